"""One place where vToken meets vLLM; `touchpoints` is the table of all."""

from __future__ import annotations

from dataclasses import dataclass

OPEN = "no stable hook upstream"  # what `upstream` says where vLLM offers none


@dataclass(frozen=True, slots=True)
class TouchPoint:
    """`target` is "module:Qualified.name"; `device`: met there only, everywhere when empty."""

    target: str
    kind: str
    why: str
    upstream: str
    until: str
    expects: tuple[str, ...] = ()
    device: str = ""
