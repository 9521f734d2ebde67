"""English prompts of one length as a workload, and arrivals of an open loop.

The text is the reference prose that comes with Python. A request's prompt begins anywhere in it, so
that no two have the same beginning; a seed gives the same prompts again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_bench.texts import token_ids


@dataclass(frozen=True, slots=True)
class Prose:
    """Prompts of `num_prompt` tokens that are answered with `num_new`."""

    num_prompt: int
    num_new: int

    def longest(self) -> int:
        return self.num_prompt + self.num_new

    def requests(self, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
        rng, ids = random.Random(seed), token_ids(model)
        places = [rng.randrange(len(ids) - self.num_prompt) for _ in range(count)]
        return [
            {"prompt": ids[at : at + self.num_prompt], "num_new": self.num_new} for at in places
        ]


def set_arrivals(found: list[dict[str, Any]], rate: float, seed: int) -> None:
    """The requests arrive as a Poisson process, `rate` a second."""
    rng, clock = random.Random(seed), 0.0
    for request in found:
        clock += rng.expovariate(rate)
        request["arrival_s"] = clock
