"""Installs wheels for another machine into a folder, from the index that pip or uv is set to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

PLATFORM = "x86_64-manylinux_2_31"  # glibc 2.31: Debian 11, Ubuntu 20.04 and newer
UNUSED = ("tests", "test", "include", "__pycache__")  # folders directly in a package
INDEX = {  # pip's setting -> uv's, as in setup.sh
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "PIP_FIND_LINKS": ("UV_FIND_LINKS",),
}


def index_settings(given: Mapping[str, str]) -> dict[str, str]:
    """The environment `given`, with pip's package index for uv where uv has none of its own."""
    found = dict(given)
    for pips, uvs in INDEX.items():
        if pips in given and not any(name in given for name in uvs):
            found[uvs[0]] = given[pips].replace(" ", "," if pips == "PIP_FIND_LINKS" else " ")
    if "UV_INDEX" in found:
        found.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip's own
    return found


def install(
    folder: Path, python: str, requirements: Iterable[str], *, without: Iterable[str] | None = None
) -> None:
    """Install wheels for CPython `python` into `folder`, without what no kit's step reads.

    `without`: needed by some and left out; None: nothing that is needed is added. Raises
    subprocess.CalledProcessError, after uv's own message, if there is no such wheel.
    """
    command = [_uv(), "pip", "install", "--quiet", "--no-build", "--target", str(folder)]
    command += ["--python-platform", PLATFORM, "--python-version", python]
    with tempfile.TemporaryDirectory() as made:
        if without is None:
            command.append("--no-deps")
        else:
            never = Path(made) / "without.txt"
            never.write_text("".join(f"{name}; python_version < '3'\n" for name in without))
            command += ["--override", str(never)]
        subprocess.run([*command, *requirements], env=index_settings(os.environ), check=True)
    for path in folder.glob("*/*"):
        if path.name in UNUSED and path.is_dir():
            shutil.rmtree(path)
    for path in [*folder.glob("*.dist-info/RECORD"), folder / ".lock"]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "bin", ignore_errors=True)


def _uv() -> str:
    """The uv that `make setup` put beside this Python, else the one on PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("uv", path=places) or "uv"


def pins(constraints: Path) -> dict[str, str]:
    """Versions by normalised name, of a file with lines `name==version`."""
    lines = (line.split("#")[0].strip().partition("==") for line in _lines(constraints))
    return {normalised(name): version for name, _, version in lines if version}


def names(requirements: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in _lines(requirements))
    return [line for line in lines if line]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
