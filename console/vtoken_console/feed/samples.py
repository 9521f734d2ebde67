"""Converts a point in time to a value of every chart, and an event to a marker on the time axis.

A value that the server does not report is NaN.
"""

from __future__ import annotations

import math

from vtoken import wire
from vtoken_console.feed.series import Marker, Rate
from vtoken_console.style.units import change_text

NAMES = (
    "f",
    "theta_f",
    "free_blocks",
    "waiting",  # requests
    "tokens_per_s",
    "moved_per_s",
    "ttft_p95_ms",
    "inter_token_p95_ms",
    "copy_ratio",  # share of wall time spent in copies
    "plan_ratio",  # share of wall time spent in planning
    "given_per_s",  # tokens that died because memory was short
    "goodput",  # share of requests within the SLO
    "restored_per_s",  # tokens that came back from host memory
)

KEPT = {"kept", "confirmed"}  # in the data of an event that ends a trial for good


class Sampler:
    """Converts points, in order of time, to values in the order of NAMES."""

    def __init__(self) -> None:
        self._generated, self._moved, self._copy_us, self._plan_us, self._given, self._back = (
            Rate() for _ in range(6)
        )

    def sample(self, point: wire.Point) -> tuple[float, ...]:
        ts, given, back = point.ts, point.given_tokens, point.restored_tokens
        return (
            point.f,
            point.theta_f,
            point.free_blocks,
            _nan_if_none(point.waiting),
            self._generated.add(ts, point.generated_tokens),
            self._moved.add(ts, point.moved_tokens),
            _nan_if_none(point.ttft_p95_ms),
            _nan_if_none(point.inter_token_p95_ms),
            self._copy_us.add(ts, point.copy_us) / 1e6,
            self._plan_us.add(ts, point.plan_us) / 1e6,
            math.nan if given is None else self._given.add(ts, given),
            _nan_if_none(point.goodput),
            math.nan if back is None else self._back.add(ts, back),
        )


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else value


def marker_of(event: wire.Event) -> Marker | None:
    """The marker of a configuration change; None for every other event."""
    if event.kind != "config":
        return None
    data = event.data
    return Marker(
        event.ts,
        revision=int(data.get("revision") or 0),
        actor=str(data.get("actor") or "?"),
        text=change_text(data.get("changes") or {}) or event.summary,
        kind="reverted" if "reverted" in data else "kept" if data.keys() & KEPT else "changed",
    )
