"""One vLLM interface that vToken depends on; `register` has the table of all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TouchPoint:
    """A vLLM interface.

    `target`: "module:Qualified.name". `why`: its use, a verb phrase. `expects`: the names of
    parameters that vToken relies on. `upstream`: the stable hook behind it; "": vLLM offers none.
    `until`: what would make it unnecessary. `device`: the only device that uses it; "": all.
    """

    target: str
    kind: str
    why: str
    expects: tuple[str, ...] = ()
    upstream: str = ""
    until: str = ""
    device: str = ""
