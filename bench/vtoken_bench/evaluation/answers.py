"""What loads of `FactChats` have beside speed: variants, share kept, and facts found."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from vtoken_bench.evaluation.chats import FactChats
from vtoken_bench.evaluation.points import Labels, Point, Run, Setting, pick
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.grounds.paired import Interval, Pairs, share

POLICY = "keydiff"
KEEP = 0.3333  # of the prompt: the fixed budget, and the floor under pressure
FIXED, PRESSURE = "vToken, fixed budget", "vToken, pressure"
CHATS = FactChats("chats with a fact", 200, 128)
BUDGET: dict[str, Any] = {
    "policy": {"name": POLICY},
    "budget_ratio": KEEP,
    "budget_floor_tokens": 64,
    "interval_tokens": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    NAIVE: BUDGET | {"reclamation": "off"},
    FIXED: BUDGET,
    PRESSURE: BUDGET | {"evict_when": "pressure"},
}


def blocks_each(setting: Setting) -> int:
    """Of one request at its end, nothing evicted."""
    return -(-CHATS.longest() // setting.block_size)


def chat_points(
    setting: Setting, labels: Labels, num_blocks: int, num_requests: int, **load: Any
) -> list[Point]:
    """The same chats on stock vLLM and in every configuration of `CONFIGS`."""
    native = setting.point({**labels, "variant": NATIVE}, CHATS, num_requests, num_blocks, **load)
    return [native, *[native.configured(name, config) for name, config in CONFIGS.items()]]


def kept(run: Run) -> float:
    """The live share of a request's tokens at its end, in the mean; 1 on stock vLLM."""
    count = len(run.figures["found"])
    return float(run.figures.get("kept_share_sum", count)) / count


def found(runs: Sequence[Run]) -> list[bool]:
    """For every answer whether it has the fact."""
    return [flag for run in sorted(runs, key=lambda r: r.repeat) for flag in run.figures["found"]]


def answers_interval(runs: Sequence[Run]) -> Interval:
    """The share of answers that have the fact."""
    return share(found(runs))


def paired_answers(runs: Sequence[Run], one: Labels, other: Labels) -> Pairs:
    """Answers to the same prompts, of the repeats that both have."""
    both = pick(runs, **one), pick(runs, **other)
    shared = {r.repeat for r in both[0]} & {r.repeat for r in both[1]}
    own, others = (found([r for r in side if r.repeat in shared]) for side in both)
    return Pairs.of(own, others)


def less_than_native(runs: Sequence[Run], name: str) -> list[float]:
    """By repeat, the facts found by the variant less those of native, in percentage points."""
    shares = {
        variant: {r.repeat: 100 * fmean(r.figures["found"]) for r in pick(runs, variant=variant)}
        for variant in (name, NATIVE)
    }
    both = sorted(shares[name].keys() & shares[NATIVE].keys())
    return [shares[name][n] - shares[NATIVE][n] for n in both]


def points_shown(difference: Interval) -> str:
    """A difference of shares in percentage points."""
    value, low, high = (100 * x for x in (difference.value, difference.low, difference.high))
    return f"{value:+.0f} [{low:+.0f} .. {high:+.0f}]"
