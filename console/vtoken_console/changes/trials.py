"""A change on trial: parsing of its terms, remaining time and guards as text.

Times are server times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken import wire

DEFAULT_MINUTES = 5


LIMITS = {  # of the form: alias of a guard -> what it is about, and its unit
    "guard_inter_token_p95_ms": ("inter-token p95 is above", "ms"),
    "guard_preemptions": ("preemptions are above", "since the change"),
    "guard_canary_agreement": ("agreement is below", "0..1, of the canary"),
    "guard_canary_logprob_lost": ("log-prob. lost is above", "nats a token"),
}


def parse_terms(minutes: str, limits: Mapping[str, str], others: str = "") -> dict[str, Any]:
    """Typed terms as arguments of `patch_config`; empty: no limit.

    `limits`: by the names of `LIMITS`. `others`: guards on any metric, `f > 0.5; givers < 1`.
    Raises ValueError with field, value and bound.
    """
    import msgspec  # here, to keep the first frame fast

    from vtoken.wire.bounds import fault
    from vtoken.wire.guards import GuardAliases, parse_guard

    within = _number("minutes", minutes)
    if within is not None and not within >= 1 / 60:
        raise ValueError(f"minutes = {within:g} is not above 0")
    given = {name: _number(name, text) for name, text in limits.items()}
    guards = [parse_guard(text) for text in others.split(";") if text.strip()]
    if within is None and not guards and all(limit is None for limit in given.values()):
        raise ValueError("a trial needs a time limit or guard; enter applies without a trial")
    try:
        msgspec.convert(given, GuardAliases)
    except msgspec.ValidationError as error:
        raise ValueError(fault(error, given, GuardAliases).detail) from None
    seconds = None if within is None else max(1, round(within * 60))
    return {"confirm_within_s": seconds, "guards": guards, **given}


def _number(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r} is not a number") from None
    return int(value) if value.is_integer() else value


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
