"""The wheel of a released vLLM, downloaded once."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CACHE = Path(__file__).parents[2] / "build" / "vllm"


def pip() -> list[str]:
    """The command pip: the environment's own, or uv's where that made the environment."""
    return [sys.executable, "-m", "pip"] if find_spec("pip") else ["uv", "tool", "run", "pip"]


def cached(version: str) -> Path | None:
    """The wheel of vLLM `version` if it was downloaded; None: it was not."""
    return next(iter(CACHE.glob(f"vllm-{version}-*.whl")), None)


def download(version: str) -> Path:
    """The wheel of vLLM `version`, alone; half a gigabyte if it is not there yet.

    Raises subprocess.CalledProcessError if the package index has none for this machine.
    """
    found = cached(version)
    if found is None:
        options = ["--no-deps", "--only-binary", ":all:", "--dest", str(CACHE)]
        subprocess.run([*pip(), "download", *options, f"vllm=={version}"], check=True)
        found = cached(version)
        assert found is not None
    return found
