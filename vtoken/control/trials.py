"""A change on trial: until when it must be confirmed, and what it must not cost meanwhile.

Knows clocks and measurements, neither the configuration nor who asks. Time is monotonic, so a jump
of the wall clock ends nothing early or never; documents carry Unix times for people.

1. a guard is judged by what happened since the change: preemptions counted, gaps between tokens
   measured, of these the newest minute's (`vtoken.runtime.latency` says how exactly)
2. a p95 is judged once it rests on `MIN_INTERVALS` gaps, of which one may be an outlier
3. once over, a trial gives the same verdict for ever
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vtoken.commands import PatchConfig
from vtoken.errors import RefusedError
from vtoken.runtime.latency import Histogram
from vtoken.wire import GUARD_SECONDS, Guard, Percentiles, Trial

MIN_INTERVALS = 20

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a change asks for: time to confirm it, a guard, or both."""

    confirm_within_s: int | None = None
    guard: Guard | None = None
    guard_for_s: int | None = None

    @staticmethod
    def of(call: PatchConfig) -> Terms | None:
        """The terms of a change, None when it has none; raises RefusedError."""
        p95, preemptions = call.guard_inter_token_p95_ms, call.guard_preemptions
        guarded = p95 is not None or preemptions is not None
        if call.guard_for_s is not None and not guarded:
            raise RefusedError(
                "guard_for_s says how long a guard holds, and there is none",
                field="guard_for_s",
                value=call.guard_for_s,
                bound="only with guard_inter_token_p95_ms or guard_preemptions",
            )
        if call.confirm_within_s is None and not guarded:
            return None
        guard = Guard(inter_token_p95_ms=p95, preemptions=preemptions) if guarded else None
        return Terms(call.confirm_within_s, guard, call.guard_for_s)

    def __str__(self) -> str:
        parts = []
        if self.confirm_within_s is not None:
            parts.append(f"confirm within {self.confirm_within_s} s")
        if self.guard is not None and self.guard.inter_token_p95_ms is not None:
            parts.append(f"reverted if p95 inter-token > {self.guard.inter_token_p95_ms:g} ms")
        if self.guard is not None and self.guard.preemptions is not None:
            parts.append(f"reverted if preemptions > {self.guard.preemptions}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended: `by` "trial" or "guard"; `reason` in plain words, with both numbers."""

    by: Literal["trial", "guard"]
    reverts: bool
    reason: str


class RunningTrial:
    """One revision on trial.

    `preemptions` is the counter's value now, whenever it is asked for. `gaps`: the times between
    tokens since the change; None where no guard looks at them.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        revision: int,
        actor: str,
        changes: dict[str, list[Any]],
        preemptions: int,
        gaps: Histogram | None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._terms = terms
        self._clock = clock
        self.gaps = gaps
        self._preemptions = preemptions
        now, started_ts = clock(), time.time()
        within, lasts = terms.confirm_within_s, None
        if terms.guard is not None:
            lasts = terms.guard_for_s or within or GUARD_SECONDS
        self._expires = None if within is None else now + within
        self._guard_until = None if lasts is None else now + lasts
        self.document = Trial(
            revision=revision,
            actor=actor,
            started_ts=started_ts,
            expires_ts=None if within is None else started_ts + within,
            guard=terms.guard,
            guard_until_ts=None if lasts is None else started_ts + lasts,
            changes=changes,
        )

    def verdict(self, preemptions: int) -> Verdict | None:
        """How the trial ended; None while it runs. An expiring guard is judged once more."""
        now = self._clock()
        if self._guard_until is not None:
            passed = self._passed(preemptions - self._preemptions)
            if passed is not None:
                return Verdict("guard", True, passed)
            if now >= self._guard_until and self._expires is None:
                return Verdict("guard", False, self._held(preemptions - self._preemptions))
            if now >= self._guard_until:
                self._guard_until = None
        if self._expires is not None and now >= self._expires:
            within = self._terms.confirm_within_s
            return Verdict("trial", True, f"not confirmed within {within} s")
        return None

    def _passed(self, preemptions: int) -> str | None:
        """Which bound of the guard is passed, with both numbers."""
        guard = self._terms.guard
        assert guard is not None
        if guard.preemptions is not None and preemptions > guard.preemptions:
            return f"preemptions {preemptions} > {guard.preemptions}"
        limit = guard.inter_token_p95_ms
        if limit is None:
            return None
        p95 = self._p95()
        return f"p95 inter-token {p95:g} ms > {limit:g} ms" if p95 and p95 > limit else None

    def _held(self, preemptions: int) -> str:
        guard, parts = self._terms.guard, []
        assert guard is not None
        if guard.inter_token_p95_ms is not None:
            p95, limit = self._p95(), guard.inter_token_p95_ms
            few = f"not judged, fewer than {MIN_INTERVALS} gaps in the last minute"
            told = few if p95 is None else f"{p95:g} ms <= {limit:g} ms"
            parts.append(f"p95 inter-token {told}")
        if guard.preemptions is not None:
            parts.append(f"preemptions {preemptions} <= {guard.preemptions}")
        lasted = self._terms.guard_for_s or GUARD_SECONDS
        return f"its guard held for {lasted} s: {', '.join(parts)}"

    def _p95(self) -> float | None:
        return None if self.gaps is None else judged_p95(self.gaps.window(self._clock()))


def judged_p95(gaps: Percentiles) -> float | None:
    """The p95 that a guard is judged by, in ms to three digits; None if it rests on too little."""
    if gaps.count < MIN_INTERVALS or gaps.p95_ms is None:
        return None
    return float(f"{gaps.p95_ms:.3g}")
