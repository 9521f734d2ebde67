"""`make gpu-kit`: what a GPU machine without network and without vLLM needs for checks 1 to 5.

Writes `dist/vtoken-gpu-kit.tar.gz`. There, where torch and Triton are installed:

    tar xf vtoken-gpu-kit.tar.gz && python vtoken-gpu-kit/run.py

The kit has the modules that the checks import, and numpy for several Pythons, which torch needs and
does not install. Here, `vtoken bench gpu --results FOLDER` makes the report of the results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "vtoken-gpu-kit"
SOURCES = {  # folder -> what of it; packages get an empty `__init__`
    "vtoken/base": ("arrays.py", "errors.py"),
    "vtoken/vllm/worker": ("limits.py",),
    "vtoken/vllm/cuda": ("kernels.py", "layout.py"),
    "vtoken/vllm/cuda/copies": ("*.py",),
    "bench/vtoken_bench/checks": ("*.py",),
}
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_28"
MAX_BYTES = 64 << 20


def write_sources(folder: Path) -> None:
    """The kit without numpy in `folder`: it runs where numpy is installed."""
    shutil.copy(Path(__file__).parent / "run.py", folder)
    for source, patterns in SOURCES.items():
        inside = folder / "src" / source.removeprefix("bench/")
        inside.mkdir(parents=True, exist_ok=True)
        for path in (p for pattern in patterns for p in (ROOT / source).glob(pattern)):
            if path.name != "__init__.py":
                shutil.copy(path, inside)
    for package in (p for p in (folder / "src").rglob("*") if p.is_dir()):
        (package / "__init__.py").touch()


def index_settings() -> dict[str, str]:
    """The environment with pip's index for uv, if uv has none of its own, as in setup.sh."""
    found = dict(os.environ)
    if "PIP_INDEX_URL" in found and not {"UV_INDEX_URL", "UV_DEFAULT_INDEX"} & found.keys():
        found["UV_DEFAULT_INDEX"] = found["PIP_INDEX_URL"]
    return found


def write_numpy(folder: Path, pythons: Sequence[str]) -> None:
    for python in pythons:
        subprocess.run(
            [
                *("uv", "pip", "install", "--quiet", "--no-deps", "--no-build"),
                *("--target", str(folder / "lib" / python), "--python-platform", PLATFORM),
                *("--python-version", python, f"numpy=={version('numpy')}"),
            ],
            env=index_settings(),
            check=True,
        )
        for tests in [*(folder / "lib" / python).rglob("tests")]:
            shutil.rmtree(tests)


def pack(folder: Path, target: Path) -> None:
    """Pack `folder`; raises ValueError when the kit is too large to carry."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as packed:
        packed.add(folder, NAME, filter=_plain)
    size = target.stat().st_size
    print(f"{target}: {size / (1 << 20):.1f} MiB")
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes are more than {MAX_BYTES}; pack fewer with --pythons")


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return None if "__pycache__" in info.name else info


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-kit", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--pythons", nargs="*", default=PYTHONS, help="with numpy for these")
    parser.add_argument("--target", type=Path, default=ROOT / "dist" / f"{NAME}.tar.gz")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        write_sources(Path(made))
        write_numpy(Path(made), arguments.pythons)
        pack(Path(made), arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
