"""Compares policies: the measured quality of each at the current budget, and its probe's cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vtoken.base.quantities import time_text

if TYPE_CHECKING:
    from vtoken import wire

PROBED = frozenset({"attention", "keys"})  # needs that cost a probe of the model


def budget_share(requests: Iterable[wire.RequestRow], budget_tokens: int) -> float | None:
    """The budget as a share of the median length (prompt and output) of running requests.

    None if no request is running.
    """
    lengths = [r.prompt_tokens + r.output_tokens for r in requests if r.state == "running"]
    return budget_tokens / statistics.median(lengths) if lengths else None


def share_text(share: float | None) -> str:
    """The share of a running request that the budget keeps, as text."""
    if share is None:
        return "no request runs"
    if share >= 1:
        return "the budget holds the full median request"
    return f"the budget holds {share:.0%} of the median request"


def quality_text(quality: Sequence[wire.Recall], share: float | None) -> str:
    """Recall at the largest measured budget that is at most `share`, else at the smallest.

    A smaller budget does not overstate quality. If `share` is None: at the smallest and largest.
    """
    if not quality:
        return "not measured"
    points = sorted(quality, key=lambda point: point.keep)
    if share is None:
        ends = points if len(points) == 1 else (points[0], points[-1])
        return ", ".join(f"{point.recall:.0%} at {point.keep:.0%}" for point in ends)
    within = [point for point in points if point.keep <= share]
    point = within[-1] if within else points[0]
    return f"{point.recall:.0%} of {point.samples} at {point.keep:.0%}"


def probe_text(
    info: wire.PolicyInfo, in_force: wire.PolicyInfo | None, price: wire.Price | None
) -> str:
    """The probe's measured cost if the policy in force reads the same data, else what it reads."""
    reads = PROBED & set(info.needs)
    if not reads:
        return "no probe"
    same = in_force is not None and PROBED & set(in_force.needs) == reads
    if price is None or price.source != "measured" or not same:
        return "probes " + " and ".join(sorted(reads))
    return time_text(price.us / 1e3)


def remedy(infos: Iterable[wire.PolicyInfo], model: str) -> str:
    """How to measure the policies; empty if any is measured."""
    if any(info.quality for info in infos):
        return ""
    return f"not measured: vtoken calibrate {model}"
