"""The table of touch points compared between two versions of vLLM, by their source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import unified_diff

from scripts.touchpoints.source import Found, Source
from vtoken.vllm.touchpoints.touchpoint import TouchPoint


@dataclass(frozen=True)
class Change:
    """A touch point whose code differs. `members`: of a class, the names that differ."""

    point: TouchPoint
    diff: list[str]
    members: list[str]

    def size(self) -> str:
        """Lines that appeared and disappeared."""
        added = sum(line.startswith("+") for line in self.diff[2:])
        removed = sum(line.startswith("-") for line in self.diff[2:])
        return f"+{added} -{removed}"


@dataclass
class Comparison:
    """What the newer version changes. `missing`: what vToken needs and does not find, in words."""

    unchanged: list[TouchPoint] = field(default_factory=list)
    changed: list[Change] = field(default_factory=list)
    added: list[TouchPoint] = field(default_factory=list)
    removed: list[TouchPoint] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def compare(
    points: Iterable[TouchPoint], old: tuple[str, Source], new: tuple[str, Source]
) -> Comparison:
    """Compare `points` between two versions of vLLM, given as number and source.

    A touch point that the newer version should have and lacks is missing. So are a parameter that
    vToken relies on, and an abstract method that no touch point names: vToken's subclass would
    have no such method.
    """
    points = list(points)
    result = Comparison()
    for point in points:
        before, after = old[1].find(point.target), new[1].find(point.target)
        if after is None:
            if point.is_in(new[0]):
                result.missing.append(f"{point.target}: there is none; needed to {point.why}")
            elif before is not None:
                result.removed.append(point)
            continue
        lacking = [p for p in point.expects if p not in new[1].parameters(point.target)]
        if lacking:
            result.missing.append(
                f"{point.target}: it does not take {', '.join(lacking)}; needed to {point.why}"
            )
        if before is None:
            result.added.append(point)
        elif before.normal() == after.normal():
            result.unchanged.append(point)
        else:
            result.changed.append(_change(point, before, after))
    result.missing += _abstract(points, old[1], new[1])
    return result


def _change(point: TouchPoint, before: Found, after: Found) -> Change:
    diff = unified_diff(before.normal().splitlines(), after.normal().splitlines(), lineterm="", n=2)
    one, other = before.members(), after.members()
    members = [name for name in one | other if one.get(name) != other.get(name)]
    return Change(point, list(diff), members)


def _abstract(points: list[TouchPoint], old: Source, new: Source) -> list[str]:
    """The abstract methods of subclassed classes that are new and that no touch point names."""
    named = {point.target for point in points}
    owners: dict[str, TouchPoint] = {}
    for point in points:
        if point.kind == "subclass":
            module, _, path = point.target.partition(":")
            owners.setdefault(f"{module}:{path.partition('.')[0]}", point)
    return [
        f"{owner}.{method}: a subclass must define it; no touch point names it (vToken subclasses "
        f"the class to {point.why})"
        for owner, point in owners.items()
        for method in sorted(new.abstract_methods(owner) - old.abstract_methods(owner))
        if f"{owner}.{method}" not in named
    ]
