"""The setting `slo`: objectives of latency as text, and whether a request met them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from vtoken.base.errors import RefusedError

UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0}
NAMES = ("ttft", "itl")
FORM = "as in ttft<2s, itl<80ms; units: ms, s, min; empty: none"
_LIMIT = re.compile(r"(\w+)\s*<\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Zµ]*)")


@dataclass(frozen=True, slots=True)
class Objectives:
    """The most seconds until a request's first token, and from one token to the next, on average;
    `text`: the setting, empty without a limit.
    """

    text: str = ""
    ttft_s: float = math.inf
    itl_s: float = math.inf

    def met(self, ttft_s: float, itl_s: float) -> bool:
        """Whether a request of these times met every limit."""
        return ttft_s <= self.ttft_s and itl_s <= self.itl_s


def parse_objectives(text: str) -> Objectives:
    """The objectives in `text`, whose own text has one form; raises RefusedError."""
    limits: dict[str, float] = {}
    parts = []
    for part in text.split(",") if text.strip() else ():
        found = _LIMIT.fullmatch(part.strip())
        if found is None:
            raise _refusal(text, f"{part.strip()!r} is not NAME<TIME")
        name, number, unit = found.groups()
        if name not in NAMES:
            raise _refusal(text, f"{name} is none of {', '.join(NAMES)}")
        if name in limits:
            raise _refusal(text, f"{name} is there twice")
        if unit not in UNITS_S:
            raise _refusal(text, f"{number}{unit} has no unit of {', '.join(UNITS_S)}")
        limits[name] = float(number) * UNITS_S[unit]
        if not 0 < limits[name] < math.inf:
            raise _refusal(text, f"{name} needs a time above 0")
        parts.append(f"{name}<{number}{unit}")
    return Objectives(", ".join(parts), **{f"{name}_s": limit for name, limit in limits.items()})


def _refusal(text: str, why: str) -> RefusedError:
    return RefusedError(f"slo = {text!r}: {why}", field="slo", value=text, bound=FORM)
