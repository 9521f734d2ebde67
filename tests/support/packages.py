"""Packages with policies and signals, as an installer leaves them behind on sys.path."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from vtoken.policies import registry
from vtoken.policies.signals import kind

EXAMPLES = Path(__file__).parents[2] / "examples"
Points = Mapping[str, Mapping[str, str]]  # group -> name -> "module:class"
Install = Callable[[str, Points, Mapping[str, str]], None]


def _forget() -> None:
    registry._load_all.cache_clear()
    kind._load_packages.cache_clear()


@contextmanager
def installer(folder: Path) -> Iterator[Install]:
    """`install(package, entry points, files)` into `folder`, undone at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        modules = set(sys.modules)

        def install(package: str, points: Points, files: Mapping[str, str]) -> None:
            for name, text in files.items():
                (folder / name).write_text(text)
            info = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n"
            )
            lines: list[str] = []
            for group, entries in points.items():
                lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
            (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
            _forget()

        yield install
        for name in sys.modules.keys() - modules:
            if (folder / f"{name}.py").exists():
                del sys.modules[name]
    _forget()


def install_example(install: Install, name: str) -> None:
    """The package in `examples/NAME`, as its own pyproject.toml declares it."""
    folder = EXAMPLES / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    files = {file.name: file.read_text() for file in folder.glob("*.py")}
    install(project["name"], project["entry-points"], files)
