"""One place where vToken meets vLLM; the tables are `touchpoints` and `cuda.touchpoints`."""

from __future__ import annotations

from dataclasses import dataclass


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
