"""Who may know whom: proved at run time in a fresh interpreter, and statically by import-linter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = [
    "vtoken",
    "vtoken.wire",
    "vtoken.runtime.runtime",
    "vtoken.control.controller",
    "vtoken.cli",
]
MODULES = [*LIGHT, "vtoken_console", "vtoken_api"]


def loaded_by(module: str) -> set[str]:
    """Top-level names in sys.modules after `import module` in a fresh interpreter."""
    code = f"import {module}, sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_import_loads_neither_vllm_nor_torch(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        pytest.skip(f"{module} is not there")
    assert not loaded_by(module) & {"vllm", "torch", "transformers"}


def test_the_client_brings_no_library_before_it_is_used() -> None:
    assert not loaded_by("vtoken.client") & {"numpy", "httpx", "websockets", "rich"}


def test_the_probe_sees_what_a_module_imports() -> None:
    assert {"numpy", "vtoken"} <= loaded_by("vtoken.runtime.runtime")


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
