"""A change on trial: parsing of its terms, remaining time and guard as text.

Times are server times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vtoken_console.style import units

if TYPE_CHECKING:
    from vtoken import wire

DEFAULT_MINUTES = 5


def parse_terms(
    minutes: str, p95_ms: str, preemptions: str, agreement: str = "", lost: str = ""
) -> dict[str, Any]:
    """Typed terms as arguments of `patch_config`; empty: no limit.

    Raises ValueError with field, value and bound.
    """
    from vtoken.wire import MAX_GUARD_LOGPROB  # here, to keep the first frame fast

    limit = _number("minutes", minutes, "above 0")
    p95 = _number("inter-token p95", p95_ms, "in ms, above 0")
    count = _number("preemptions", preemptions, "0 or more")
    least = _number("agreement", agreement, "in 0..1")
    most = _number("log-probability lost", lost, "in nats, 0 or more")
    if all(term is None for term in (limit, p95, count, least, most)):
        raise ValueError("a trial needs a time limit or guard; enter applies without a trial")
    for name, value, smallest in (("minutes", limit, 1 / 60), ("inter-token p95", p95, 0.001)):
        if value is not None and value < smallest:
            raise ValueError(f"{name} = {value:g} is not above 0")
    if least is not None and not 0 <= least <= 1:
        raise ValueError(f"agreement = {least:g} is not in 0..1")
    if most is not None and not 0 <= most <= MAX_GUARD_LOGPROB:
        raise ValueError(f"log-probability lost = {most:g} is not in 0..{MAX_GUARD_LOGPROB:g}")
    if count is not None and (count < 0 or count != int(count)):
        raise ValueError(f"preemptions = {preemptions} is not a whole number, 0 or more")
    return {
        "confirm_within_s": None if limit is None else max(1, round(limit * 60)),
        "guard_inter_token_p95_ms": p95,
        "guard_preemptions": None if count is None else int(count),
        "guard_canary_agreement": least,
        "guard_canary_logprob_lost": most,
    }


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


def remaining_text(trial: wire.Trial, server_now: float, *, short: bool = False) -> str:
    """When and how a trial ends automatically."""
    if trial.expires_ts is not None:
        left = countdown(trial.expires_ts - server_now)
        return f"{left} left" if short else f"reverted in {left} unless kept"
    if trial.guard_until_ts is not None:
        left = countdown(trial.guard_until_ts - server_now)
        return f"guarded {left}" if short else f"guarded for {left}"
    return "on trial"


def guard_text(trial: wire.Trial, status: wire.Status | None) -> str:
    """The bounds of a trial's guard, with the current values."""
    guard = trial.guard
    if guard is None:
        return ""
    parts = []
    if guard.inter_token_p95_ms is not None:
        now = status.latency.inter_token.p95_ms if status and status.latency else None
        bound = units.latency(guard.inter_token_p95_ms, 0)
        parts.append(f"p95 ≤ {bound} (now {units.latency(now, 0)})")
    if guard.preemptions is not None:
        parts.append(f"preemptions ≤ {guard.preemptions}")
    found = _canary(trial.revision, status)
    if guard.canary_agreement is not None:
        agreed = units.percent(found.agreement if found else None, 0)
        parts.append(f"agreement ≥ {units.percent(guard.canary_agreement, 0)} (now {agreed})")
    if guard.canary_logprob_lost is not None:
        lost = found.logprob_lost if found else None
        parts.append(f"lost ≤ {guard.canary_logprob_lost:g} (now {units.nats(lost, 0)})")
    if guard.canary_agreement is not None or guard.canary_logprob_lost is not None:
        parts.append(f"{found.count if found else 0} of {guard.canary_count} canaries")
    return ", ".join(parts)


def _canary(revision: int, status: wire.Status | None) -> wire.CanaryGroup | None:
    """The quality canary's group of `revision`: that of the policy with the most requests."""
    groups = status.canary.groups if status and status.canary else []
    matching = (group for group in groups if group.revision == revision)
    return max(matching, key=lambda group: group.count, default=None)
