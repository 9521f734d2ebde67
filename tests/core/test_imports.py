"""Who may know whom: proved at run time in a fresh interpreter, and statically by import-linter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
MODULES = [
    "vtoken",
    "vtoken.wire",
    "vtoken.core.runtime.runtime",
    "vtoken.control.controller",
    "vtoken.cli",
    "vtoken_console.app.app",
    "vtoken_api.plugin",
]
# Libraries that a module loads when it is used, not when it is imported.
LATE = {
    "vtoken.client": {"numpy", "httpx", "websockets", "rich"},
    "vtoken.wire.reducer": {"numpy", "zmq", "httpx", "websockets"},
    "vtoken_console.app.app": {"numpy", "httpx", "websockets", "msgspec"},
}
PACKAGES = ["vtoken", "vtoken_api", "vtoken_console"]


def loaded_by(module: str) -> set[str]:
    """Top-level names in sys.modules after `import module` in a fresh interpreter."""
    code = f"import {module}, sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_import_loads_neither_vllm_nor_torch(module: str) -> None:
    assert not loaded_by(module) & {"vllm", "torch", "transformers"}


@pytest.mark.parametrize("module", LATE)
def test_import_waits_for_no_library_that_only_use_needs(module: str) -> None:
    assert not loaded_by(module) & LATE[module]


def test_the_probe_sees_what_a_module_imports() -> None:
    assert {"numpy", "vtoken"} <= loaded_by("vtoken.core.runtime.runtime")


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or through others of the set."""

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        ahead = [module]
        while ahead:
            for imported in imports[ahead.pop()] - found:
                found.add(imported)
                ahead.append(imported)
        return found

    reach = {module: reached(module) for module in imports}
    rings = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in imports
        if module in reach[module]
    }
    return [set(ring) for ring in rings]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    """Imports for type checking count too: who reads one module of a cycle has to read them all."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {
        module: graph.find_modules_directly_imported_by(module) & graph.modules
        for module in graph.modules
    }
    assert not cycles(imports)


def test_the_search_for_cycles_finds_one() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
