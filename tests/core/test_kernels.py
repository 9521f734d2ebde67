"""Compiled kernels: what a kernel may refer to, and that the same source runs as plain Python."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from numba.core.registry import CPUDispatcher

import vtoken

PACKAGES = ("tables", "policies", "protocol", "planning", "runtime")


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        root = importlib.import_module(f"vtoken.{package}")
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            yield importlib.import_module(found.name)


def kernels() -> list[Any]:
    found = [value for module in modules() for value in vars(module).values()]
    return sorted({k for k in found if isinstance(k, CPUDispatcher)}, key=lambda k: k.__name__)


def foreign(kernel: Any) -> list[str]:
    """Kernels of other files that `kernel` calls: its cached code would outlive their change."""
    function = kernel.py_func
    names = function.__code__.co_names
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return [
        name
        for name, value in used.items()
        if isinstance(value, CPUDispatcher) and value.py_func.__module__ != function.__module__
    ]


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.__name__)
def test_a_kernel_calls_kernels_of_its_own_file_only(kernel: Any) -> None:
    assert foreign(kernel) == []


def test_a_kernel_works_without_a_folder_for_its_code(tmp_path: Any) -> None:
    code = (
        "import numpy as np, numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "from vtoken.compiled import kernel\n"
        "@kernel\n"
        "def total(a):\n"
        "    s = 0\n"
        "    for x in a: s += x\n"
        "    return s\n"
        "print(total(np.arange(5)))\n"
    )
    (tmp_path / "uncached.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "uncached.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(next(iter(vtoken.__path__)) + "/..")},
    )
    assert done.stdout.split() == ["10"], done.stderr
    assert "not kept on disk" in done.stderr
