"""Compare variants in short slices of decode steps.

Every variant is an engine in its own process that keeps its requests running. A round is one slice
of each variant, in alternating order, so that a drift of the machine's speed affects all alike. A
comparison is the median over rounds of the ratio of two slices of one round.

The number of tokens read per step is steady. A request that evicts nothing grows from
`LIVE_TOKENS - LIFE_STEPS / 2` to `LIVE_TOKENS + LIFE_STEPS / 2` tokens; one that evicts keeps
`LIVE_TOKENS` of a longer context. Requests are in different phases, so that their sum is constant.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vtoken_bench.engines import Engine

LIVE_TOKENS = 384  # read by a request on average; the budget of evicting requests
EVICTED_TOKENS = 256  # evicted by an evicting request at the end of its prompt
LIFE_STEPS = 320
CHECKED_TOKENS = 64  # of a canary check, computed per step
SPARE_STEPS = 8  # that a check runs longer than its slice
# Most steps between two slices: prompts of new requests, warm steps, and with a check the end of
# the last one and the request that the next one checks.
UNMEASURED_STEPS = SPARE_STEPS + 16
Metric = Literal["step_ms", "p50_ms", "cpu_ms", "instructions"]
METRICS: tuple[Metric, ...] = ("step_ms", "p50_ms", "cpu_ms", "instructions")
Rounds = list[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Variant:
    """`config` is the initial vToken configuration, None for stock vLLM.

    `lengths`: whether requests grow or evict down to the budget. `forced`: each request evicts one
    token at the end of its prompt, the oldest that its policy may name, and none afterwards.
    `checked`: the canary computes a part of a check in every measured step.
    """

    name: str
    config: dict[str, Any] | None
    lengths: Literal["growing", "evicting"] = "growing"
    forced: bool = False
    console: bool = False
    checked: bool = False

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
        ends = self._request(max(texts, key=len)[:-4], 4) if self.checked else None
        return {"hold": {"requests": requests, "lives_slices": lives, "ends": ends}}

    def _request(self, ids: Sequence[int], num_new: int) -> dict[str, Any]:
        arguments = {"vtoken_budget_tokens": len(ids) - 1} if self.forced else None
        return {"prompt": list(ids), "num_new": num_new, "arguments": arguments}


def longest_check_tokens(slice_steps: int) -> int:
    """Length of a request whose check takes an entire slice."""
    return CHECKED_TOKENS * (slice_steps + SPARE_STEPS)


def longest_tokens(slice_steps: int) -> int:
    """Length of the longest request of any variant, prompt and output."""
    lives = max(1, LIFE_STEPS // slice_steps)
    return LIVE_TOKENS + EVICTED_TOKENS + LIFE_STEPS + lives * (slice_steps + UNMEASURED_STEPS)


@dataclass(frozen=True)
class Comparison:
    """The ratio of one metric of two variants over the rounds.

    `low`, `high`: 10th and 90th percentile. `resolved`: the effect exceeds that spread. `least`,
    `most`: the 95% confidence interval of the median for any distribution. `values`: by round.
    """

    ratio: float
    low: float
    high: float
    least: float
    most: float
    values: tuple[float, ...] = ()

    @property
    def resolved(self) -> bool:
        return abs(self.ratio - 1) > self.high - self.low

    def __str__(self) -> str:
        about = "" if self.resolved else "≈ "
        return f"{about}{self.ratio:.3f} [{self.low:.2f} .. {self.high:.2f}]"


SPREAD_NOTE = (
    "[10th .. 90th percentile over the rounds]; ≈: that spread exceeds the effect, no difference is"
    " shown"
)


def compare(rounds: Rounds, variant: str, against: str, metric: Metric) -> Comparison | None:
    """The ratio of `variant` to `against`; None if the metric was not measured."""
    pairs = [(r[variant][metric], r[against][metric]) for r in rounds]
    if any(one is None or other is None for one, other in pairs):
        return None
    by_round = [one / other for one, other in pairs]
    ratios = sorted(by_round)
    low, high = np.percentile(ratios, (10, 90)).tolist()
    outside = _outside(len(ratios))
    known = outside >= 0
    least = ratios[outside] if known else 0.0
    most = ratios[-1 - outside] if known else math.inf
    return Comparison(statistics.median(ratios), low, high, least, most, tuple(by_round))


def _outside(count: int) -> int:
    """How many of `count` sorted values to leave out on either side of the median's 95% interval.

    The median is below the k-th smallest of n with probability P(Binomial(n, 1/2) < k); -1 where
    even the smallest and the largest value do not enclose it with 95%.
    """
    outside, chance = -1, 0.0
    for k in range(count // 2):
        chance += math.comb(count, k) / 2**count
        if chance > 0.025:
            break
        outside = k
    return outside


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


def alternate(engines: dict[str, Engine], num_rounds: int, slice_steps: int, label: str) -> Rounds:
    """Run `num_rounds` rounds of one slice of every engine; the engines hold their requests."""
    rounds: Rounds = []
    for number in range(-1, num_rounds):  # the first one warms up
        names = list(engines) if number % 2 == 0 else list(engines)[::-1]
        found = {name: step_metrics(engines[name].ask({"slice": slice_steps})) for name in names}
        if number >= 0:
            rounds.append(found)
        print(f"{label}: round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return rounds


def medians(rounds: Rounds, variant: str) -> dict[str, Any]:
    """The medians of a variant's metrics over the rounds."""
    out: dict[str, Any] = {}
    for key in rounds[0][variant]:
        values = [r[variant][key] for r in rounds]
        out[key] = None if any(v is None for v in values) else statistics.median(values)
    return out


def as_raw(comparison: Comparison | None) -> dict[str, Any] | None:
    return None if comparison is None else asdict(comparison) | {"resolved": comparison.resolved}
