"""A change on trial: parsing of its terms, remaining time and guards as text.

Times are server times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vtoken import wire

DEFAULT_MINUTES = 5


class Limit(NamedTuple):
    """A guard with a field of its own in the form: what it is about, and its unit."""

    label: str
    unit: str  # "s": of a time, which may be typed in another one
    guard: str  # up to the number


LIMITS = {
    "inter_token_p95": Limit(
        "p95 between tokens is above",
        "s",
        "latency_seconds{kind=inter_token,quantile=0.95}>",
    ),
    "preemptions": Limit("preemptions are above", "since the change", "preemptions>"),
}


def parse_terms(minutes: str, limits: Mapping[str, str], others: str = "") -> dict[str, Any]:
    """Typed terms as arguments of `patch_config`; empty: no limit.

    `limits`: by the names of `LIMITS`; a time is `2 s` or `800 ms`. `others`: guards on any metric,
    `goodput<0.95; short_blocks>20`.
    Raises ValueError with field, value and bound.
    """
    from vtoken.wire.guards import parse_guard  # here, to keep the first frame fast

    within = _number("minutes", minutes)
    if within is not None and not within >= 1 / 60:
        raise ValueError(f"minutes = {within:g} is not above 0")
    texts = []
    for name, text in limits.items():
        limit = LIMITS[name]
        value = _seconds(name, text) if limit.unit == "s" else _number(name, text)
        if value is None:
            continue
        if not value >= 0:
            raise ValueError(f"{name} = {value:g} is not 0 or more")
        texts.append(f"{limit.guard}{value:.15g}")
    texts += [text for text in others.split(";") if text.strip()]
    if within is None and not texts:
        raise ValueError("a trial needs a time limit or guard; enter applies without a trial")
    seconds = None if within is None else max(1, round(within * 60))
    return {"confirm_within_s": seconds, "guards": [parse_guard(text) for text in texts]}


def _number(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r} is not a number") from None


def _seconds(name: str, text: str) -> float | None:
    """`800 ms` or `2 s`; a number without unit is refused, for either may be meant."""
    number = text.strip().removesuffix("s").removesuffix("m").strip()
    value = _number(name, number)
    if value is not None and not text.strip().endswith("s"):
        raise ValueError(f"{name} = {number} needs a unit: {number} ms or {number} s")
    return value if value is None or not text.strip().endswith("ms") else value / 1e3


def countdown(seconds: float) -> str:
    """Time left, in at most seven columns: 4:32, 1:02:03."""
    whole = max(0, int(seconds + 0.999))
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def remaining_text(trial: wire.Trial, server_now: float, *, short: bool = False) -> str:
    """When and how a trial ends automatically."""
    if trial.expires_ts is not None:
        left = countdown(trial.expires_ts - server_now)
        return f"{left} left" if short else f"reverted in {left} unless kept"
    if trial.guard_until_ts is not None:
        left = countdown(trial.guard_until_ts - server_now)
        return f"guarded {left}" if short else f"guarded for {left}"
    return "on trial"


def guards_text(status: wire.Status | None) -> str:
    """The guards of the change on trial, with their values now."""
    if status is None or not status.guards:
        return ""
    from vtoken.wire.guards import held_text

    return "; ".join(held_text(guard) for guard in status.guards)
