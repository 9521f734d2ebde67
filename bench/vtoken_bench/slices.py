"""Compare variants in short slices of decode steps.

Every variant is an engine in its own process that keeps its requests running. A round is one slice
of each variant, in alternating order, so that a drift of the machine's speed affects all alike, and
ratios are of two slices of one round.

The number of tokens read per step is steady. A request that evicts nothing grows from
`LIVE_TOKENS - LIFE_STEPS / 2` to `LIVE_TOKENS + LIFE_STEPS / 2` tokens; one that evicts keeps
`LIVE_TOKENS` of a longer context. Requests are in different phases, so that their sum is constant.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vtoken_bench.engines import Engine
from vtoken_bench.evaluation.points import Run

LIVE_TOKENS = 384  # read by a request on average; the budget of evicting requests
EVICTED_TOKENS = 256  # evicted by an evicting request at the end of its prompt
LIFE_STEPS = 320
UNMEASURED_STEPS = 16  # at most between two slices: prompts of new requests, and warm steps


@dataclass(frozen=True)
class Variant:
    """`config` is the initial vToken configuration, None for stock vLLM.

    `lengths`: whether requests grow or evict down to the budget. `forced`: each request evicts one
    token at the end of its prompt, the oldest that its policy may name, and none afterwards.
    """

    name: str
    config: dict[str, Any] | None
    lengths: Literal["growing", "evicting"] = "growing"
    forced: bool = False
    console: bool = False

    def hold_message(self, texts: Sequence[Sequence[int]], slice_steps: int) -> dict[str, Any]:
        """The `hold` message to a worker: one request per text, spread over phases of a life."""
        lives = max(1, LIFE_STEPS // slice_steps)
        num_new = lives * (slice_steps + UNMEASURED_STEPS)
        before = LIVE_TOKENS - LIFE_STEPS // 2
        length = before if self.lengths == "growing" else LIVE_TOKENS + EVICTED_TOKENS
        requests = []
        for i, text in enumerate(texts):
            phase = i * lives // len(texts)
            first = self._request(text[: length + phase * slice_steps], num_new)
            again = self._request(text[:length], num_new)
            requests.append({"first": first, "again": again, "phase": phase})
        return {"hold": {"requests": requests, "lives_slices": lives}}

    def _request(self, ids: Sequence[int], num_new: int) -> dict[str, Any]:
        arguments = {"vtoken_budget_tokens": len(ids) - 1} if self.forced else None
        return {"prompt": list(ids), "num_new": num_new, "arguments": arguments}


def longest_tokens(slice_steps: int) -> int:
    """Length of the longest request of any variant, prompt and output."""
    lives = max(1, LIFE_STEPS // slice_steps)
    return LIVE_TOKENS + EVICTED_TOKENS + LIFE_STEPS + lives * (slice_steps + UNMEASURED_STEPS)


def step_metrics(reply: dict[str, Any]) -> dict[str, Any]:
    """Metrics of one slice per step: wall time, CPU time, instructions, vToken's own code."""
    steps = reply["steps_ms"]
    counted = reply["instructions"]
    return {
        "step_ms": statistics.fmean(steps),
        "p50_ms": statistics.median(steps),
        "cpu_ms": reply["cpu_seconds"] * 1e3 / len(steps),
        "instructions": None if counted is None else counted / len(steps),
        "tokens_per_second": reply["tokens"] / (sum(steps) / 1e3),
        **{f"{k}_us": v * 1e6 / len(steps) for k, v in reply["hook_seconds"].items()},
        **{k: reply[k] / len(steps) for k in ("evicted_tokens", "moved_tokens") if k in reply},
    }


def alternate(
    engines: Mapping[str, Engine], num_rounds: int, slice_steps: int, label: str
) -> list[Run]:
    """Run `num_rounds` rounds of one slice of every engine; the engines hold their requests."""
    runs: list[Run] = []
    for number in range(-1, num_rounds):  # the first one warms up
        for name in list(engines)[:: -1 if number % 2 else 1]:
            figures = step_metrics(engines[name].ask({"slice": slice_steps}))
            if number >= 0:
                runs.append(Run({"variant": name}, number, figures))
        print(f"{label}: round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return runs
