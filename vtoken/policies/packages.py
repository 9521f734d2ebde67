"""Classes that other packages add through an entry point group, each under its entry's name.

A class that fails to load is reported with its error and does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

T = TypeVar("T")


def load_group(
    group: str, base: type[T], taken: Container[str], check: Callable[[Any], object]
) -> tuple[dict[str, type[T]], dict[str, str]]:
    """The subclasses of `base` that `group` adds, and the error of each entry that failed, by
    "name (package)". `check` raises for a class that must not be offered.
    """
    found: dict[str, type[T]] = {}
    broken: dict[str, str] = {}
    for point in entry_points(group=group):
        try:
            cls = point.load()
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise TypeError(f"{point.value} is not a subclass of {_public(base)}")
            name = getattr(cls, "name", None)
            if name != point.name:
                raise ValueError(f"{point.value} has the name {name!r}, not {point.name!r}")
            if point.name in taken or point.name in found:
                raise ValueError(f"the name {point.name!r} is taken")
            check(cls)
            found[point.name] = cls
        except (Exception, SystemExit) as error:  # other packages may raise anything
            broken[_origin(point)] = f"{type(error).__name__}: {error}"
    return found, broken


def _public(base: type) -> str:
    return f"vtoken.policies.{base.__name__}"


def _origin(point: EntryPoint) -> str:
    package = "unknown package" if point.dist is None else point.dist.name
    return f"{point.name} ({package})"
