"""One vLLM interface that vToken depends on; `register` has the table of all."""

from __future__ import annotations

from dataclasses import dataclass

OPEN = "no stable hook upstream"  # value of `upstream` if vLLM offers none


@dataclass(frozen=True, slots=True)
class TouchPoint:
    """A vLLM interface.

    `target`: "module:Qualified.name". `why`: its use, a verb phrase. `upstream`: the stable hook
    behind it. `until`: what would make it unnecessary. `device`: the only device that uses it; "":
    all.
    """

    target: str
    kind: str
    why: str
    upstream: str
    until: str
    expects: tuple[str, ...] = ()
    device: str = ""
