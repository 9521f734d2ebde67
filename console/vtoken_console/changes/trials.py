"""A change on trial, in words: what is asked for, how long it still runs, what its guard stands at.

Knows no widget and no socket. Times are the server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken_console.look import units

if TYPE_CHECKING:
    from vtoken import wire

DEFAULT_MINUTES = 5


@dataclass(frozen=True, slots=True)
class Terms:
    """What a change is tried under; None: not limited in that."""

    confirm_within_s: int | None = None
    guard_inter_token_p95_ms: float | None = None
    guard_preemptions: int | None = None

    def params(self) -> dict[str, Any]:
        """As arguments of a call that patches the configuration."""
        return {
            "confirm_within_s": self.confirm_within_s,
            "guard_inter_token_p95_ms": self.guard_inter_token_p95_ms,
            "guard_preemptions": self.guard_preemptions,
        }


def read_terms(minutes: str, p95_ms: str, preemptions: str) -> Terms:
    """The terms as typed; raises ValueError naming what is wrong. Empty: not limited."""
    limit = _number("minutes", minutes, "above 0")
    p95 = _number("inter-token p95", p95_ms, "in ms, above 0")
    count = _number("preemptions", preemptions, "0 or more")
    if limit is None and p95 is None and count is None:
        raise ValueError("a trial needs a time limit or a guard; enter alone applies for good")
    for name, value, least in (("minutes", limit, 1 / 60), ("inter-token p95", p95, 0.001)):
        if value is not None and value < least:
            raise ValueError(f"{name} = {value:g} is not above 0")
    if count is not None and (count < 0 or count != int(count)):
        raise ValueError(f"preemptions = {preemptions} is not a whole number, 0 or more")
    return Terms(
        None if limit is None else max(1, round(limit * 60)),
        p95,
        None if count is None else int(count),
    )


def _number(name: str, text: str, bound: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r} is not a number {bound}") from None


def countdown(seconds: float) -> str:
    """Time left, in at most seven columns: 4:32, 1:02:03."""
    whole = max(0, int(seconds + 0.999))
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def ending(trial: wire.Trial, server_now: float, *, short: bool = False) -> str:
    """When and how a trial ends by itself."""
    if trial.expires_ts is not None:
        left = countdown(trial.expires_ts - server_now)
        return f"{left} left" if short else f"taken back in {left} unless kept"
    if trial.guard_until_ts is not None:
        left = countdown(trial.guard_until_ts - server_now)
        return f"guarded {left}" if short else f"guarded for {left}"
    return "on trial"


def guard_text(guard: wire.Guard | None, status: wire.Status | None) -> str:
    """What a guard allows, beside what it stands at."""
    if guard is None:
        return ""
    parts = []
    if guard.inter_token_p95_ms is not None:
        now = status.latency.inter_token.p95_ms if status and status.latency else None
        at = units.latency(now, 0)
        parts.append(f"p95 ≤ {units.latency(guard.inter_token_p95_ms, 0)} (now {at})")
    if guard.preemptions is not None:
        parts.append(f"preemptions ≤ {guard.preemptions}")
    return ", ".join(parts)
