"""One vLLM interface that vToken depends on; `register` has the table of all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TouchPoint:
    """A vLLM interface.

    `target`: "module:Qualified.name". `why`: its use, a verb phrase. `expects`: the names of
    parameters that vToken relies on. `upstream`: the stable hook behind it; "": vLLM offers none.
    `ends_with`: what would make it unnecessary. `device`: the only device that uses it, or
    "server", for the process that starts a server; "": all.
    `since`, `until`: the first version of vLLM, as "0.33", that has it and that no longer has it;
    "": all versions that vToken supports.
    """

    target: str
    kind: str
    why: str
    expects: tuple[str, ...] = ()
    upstream: str = ""
    ends_with: str = ""
    device: str = ""
    since: str = ""
    until: str = ""

    def is_in(self, version: str) -> bool:
        """Whether vLLM `version`, as "0.33.0", has this interface by `since` and `until`."""
        number = _number(version)
        return not (
            (self.since and number < _number(self.since))
            or (self.until and number >= _number(self.until))
        )


def points_at(target: str, kind: str, **common: str) -> Callable[..., TouchPoint]:
    """What makes the touch points whose targets begin with `target`; they share `common` facts.

    It takes the rest of the target with the parameters that vToken relies on, as
    "name(parameter, …)", the reason and, by name, facts of this point alone.
    """

    def point(member: str, why: str, **facts: str) -> TouchPoint:
        name, _, parameters = member.rstrip(")").partition("(")
        expects = tuple(parameters.split(", ")) if parameters else ()
        return TouchPoint(target + name, kind, why, expects, **common | facts)

    return point


def _number(version: str) -> tuple[int, ...]:
    """Its major and minor number; () for a version without them."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
