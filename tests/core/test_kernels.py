"""Compiled kernels: what a kernel may reference, and the same source as plain Python."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from numba.core.registry import CPUDispatcher

import vtoken
from tests.support.waiting import LIMIT_S
from vtoken.base.errors import InvariantViolation
from vtoken.core import selftest
from vtoken.core.tables import kernels as table_kernels

PACKAGES = ("core", "policies")


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        root = importlib.import_module(f"vtoken.{package}")
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            yield importlib.import_module(found.name)


def kernels() -> list[Any]:
    found = [value for module in modules() for value in vars(module).values()]
    return sorted({k for k in found if isinstance(k, CPUDispatcher)}, key=lambda k: k.__name__)


def foreign(kernel: Any) -> list[str]:
    """Kernels of other files that `kernel` calls: its cache would miss their changes."""
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
        "from vtoken.base.compiled import kernel\n"
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
        timeout=LIMIT_S,
        env={"PYTHONPATH": str(next(iter(vtoken.__path__)) + "/..")},
    )
    assert done.stdout.split() == ["10"], done.stderr
    assert "cannot be cached on disk" in done.stderr


def test_the_self_test_runs_every_kernel_of_the_schedulers_side() -> None:
    """Kernels called only by kernels have names with a leading underscore."""
    code = (
        "import json\n"
        "from vtoken.base.compiled import KERNELS\n"
        "from vtoken.core import selftest\n"
        "selftest.run()\n"
        "public = [k for k in KERNELS if not k.__name__.startswith('_')]\n"
        "print(json.dumps([k.__name__ for k in public if not k.signatures]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(done.stdout) == []


def test_the_self_test_runs_as_plain_python_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vtoken.core.selftest"],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "plain Python" in done.stdout


def test_the_self_test_stops_where_a_kernel_does_not_do_what_its_source_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = table_kernels.evict

    def evict(*args: Any) -> None:
        honest(*args)
        args[5].facts[args[0][0]].num_live += 1

    monkeypatch.setattr(table_kernels, "evict", evict)
    with pytest.raises(InvariantViolation, match="num_live"):
        selftest.run()
