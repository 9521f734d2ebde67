"""`make gpu-kit`: what a GPU machine without network needs for the checks of docs/gpu.md.

Writes `dist/vtoken-gpu-kit.tar.xz`. There, where torch and Triton are installed:

    tar xf vtoken-gpu-kit.tar.xz && python vtoken-gpu-kit/run.py

By default for checks 1 to 5 and 7, which need no vLLM: the modules that they import, and numpy for
several Pythons, which torch needs and does not install. `--with-vllm` packs vLLM, all packages that
it needs beside torch, and the project, for every step that `run.py --help` lists. Here,
`vtoken bench gpu --results FOLDER` makes the report of the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.gpu_kit import manifest
from scripts.gpu_kit.engine import ROOT, write_engine
from scripts.gpu_kit.wheels import install, pins

NAME = "vtoken-gpu-kit"
SOURCES = {  # folder -> what of it; packages get an empty `__init__`
    "vtoken/base": ("arrays.py", "errors.py"),
    "vtoken/vllm/worker": ("limits.py",),
    "vtoken/vllm/cuda": ("kernels.py", "layout.py", "pages.py"),
    "vtoken/vllm/cuda/copies": ("*.py",),
    "vtoken/vllm/cuda/signals": ("probe_kernels.py",),
    "bench/vtoken_bench/checks": ("*.py",),
}
PYTHONS = ("3.11", "3.12", "3.13")
MIB = 1 << 20


def write_kernels(kit: Path) -> None:
    """The modules of the checks without vLLM into `kit`; they run where numpy is installed."""
    for source, patterns in SOURCES.items():
        inside = kit / "src" / source.removeprefix("bench/")
        inside.mkdir(parents=True, exist_ok=True)
        for path in (p for pattern in patterns for p in (ROOT / source).glob(pattern)):
            if path.name != "__init__.py":
                shutil.copy(path, inside)
    for package in (p for p in (kit / "src").rglob("*") if p.is_dir()):
        (package / "__init__.py").touch()


def write_numpy(kit: Path, pythons: Sequence[str]) -> None:
    for python in pythons:
        install(kit / "lib" / python, python, [f"numpy=={version('numpy')}"])


def write_frame(kit: Path, facts: dict[str, Any]) -> None:
    """What every kit has: the command that runs there, and the manifest with `facts`."""
    shutil.copy(Path(__file__).parent / "run.py", kit)
    described = facts | {"commit": _commit(), "parts": manifest.parts(kit)}
    (kit / manifest.NAME).write_text(json.dumps(described, indent=1))


def pack(kit: Path, target: Path, *, mib: float | None = None) -> None:
    """Pack `kit`, and its manifest again beside `target`, with the archive's own size and hash.

    Raises ValueError if the archive is larger than `mib`; then `target` is as before.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}")
    try:
        with tarfile.open(made, "w:xz") as packed:
            packed.add(kit, NAME, filter=_plain)
        size = made.stat().st_size
        if mib is not None and size > mib * MIB:
            raise ValueError(
                f"the kit has {size / MIB:.1f} MiB, and --mib allows {mib:g}: leave out what the "
                "GPU machine has (--there), or pass fewer --pythons"
            )
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    described = json.loads((kit / manifest.NAME).read_text())
    described["archive"] = manifest.described(target)
    target.with_name(f"{NAME}.json").write_text(json.dumps(described, indent=1))
    print(f"{target}: {size / MIB:.1f} MiB, unpacked {_unpacked(described) / MIB:.0f}")


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return None if "__pycache__" in info.name else info


def _unpacked(described: dict[str, Any]) -> int:
    return sum(int(part["bytes"]) for part in described["parts"].values())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-kit", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--with-vllm", action="store_true", help="vLLM too, and what it needs")
    parser.add_argument(
        "--pythons", nargs="+", help="for these; with vLLM one (default: 3.11 to 3.13; 3.12)"
    )
    parser.add_argument(
        "--there",
        type=Path,
        help="with vLLM: leave out the packages that the GPU machine has, as its "
        "`pip list --format=freeze` names them in this file (default: it has only torch)",
    )
    parser.add_argument("--mib", type=float, help="the most that may be packed (default: any)")
    parser.add_argument("--target", type=Path, default=ROOT / "dist" / f"{NAME}.tar.xz")
    args = parser.parse_args(argv)
    pythons = args.pythons or (PYTHONS[1:2] if args.with_vllm else PYTHONS)
    if args.with_vllm and len(pythons) > 1:
        parser.error("--with-vllm: --pythons takes one, the GPU machine's")
    if args.there is not None and not args.with_vllm:
        parser.error("--there: without --with-vllm there is nothing to leave out")
    try:
        there = {} if args.there is None else pins(args.there)
    except OSError as error:
        parser.error(f"--there: {error}")
    if args.there is not None and "torch" not in there:
        parser.error(f"--there: {args.there} does not name torch: write it on the GPU machine")
    facts: dict[str, Any] = {"pythons": list(pythons)}
    with tempfile.TemporaryDirectory() as made:
        kit = Path(made)
        try:
            if args.with_vllm:
                facts |= write_engine(kit, pythons[0], there)
            else:
                write_kernels(kit)
                write_numpy(kit, pythons)
            write_frame(kit, facts)
            pack(kit, args.target, mib=args.mib)
        except (ValueError, subprocess.CalledProcessError) as error:
            print(f"make gpu-kit: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
