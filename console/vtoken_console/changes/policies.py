"""Compares policies: what answers contained at the current floor, and what a probe costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vtoken.base.quantities import time_text

if TYPE_CHECKING:
    from vtoken import wire

PROBED = frozenset({"attention", "keys"})  # needs that cost a probe of the model
FACTS_OF = "SmolLM2-135M-Instruct"  # the model of `PolicyInfo.facts`


def kept_share(values: Mapping[str, Any], requests: Iterable[wire.RequestRow]) -> float | None:
    """The share of a request that the edited `values` (by name) let it keep at least.

    A floor in tokens is a share of the median prompt and output of running requests; None if no
    request runs, or if a value is no number yet.
    """
    ratio, tokens = values.get("budget_ratio"), values.get("budget_tokens")
    if isinstance(ratio, float) and ratio > 0:
        return ratio
    lengths = [r.prompt_tokens + r.output_tokens for r in requests if r.state == "running"]
    if not lengths or not isinstance(tokens, int):
        return None
    return min(1.0, tokens / statistics.median(lengths))


def _at(points: Iterable[wire.FactsFound], kept: float | None) -> wire.FactsFound:
    """The point at the largest measured share that is at most `kept`, else at the smallest: what
    less is kept does not overstate quality. If `kept` is None: at the largest.
    """
    ranked = sorted(points, key=lambda point: point.keep)
    within = [point for point in ranked if kept is None or point.keep <= kept]
    return within[-1] if within else ranked[0]


def facts_text(info: wire.PolicyInfo, kept: float | None) -> str:
    """Share of facts found in answers, and where the question comes later."""
    if not info.facts:
        return "not measured"
    point = _at(info.facts, kept)
    later = "–" if point.later is None else f"{point.later:.0%}"
    return f"{point.found:.0%}".rjust(7) + later.rjust(14)


def measured_text(infos: Iterable[wire.PolicyInfo], kept: float | None) -> str:
    """Where the figures are from; "" if none has several."""
    shares = {_at(info.facts, kept).keep for info in infos if len(info.facts) > 1}
    return f"on {FACTS_OF}, {min(shares):.0%} of the prompt kept" if shares else ""


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
