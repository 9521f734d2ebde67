"""A change on trial: the deadline for its confirmation, and the guard that reverts it.

Time is monotonic, so a jump of the wall clock neither shortens nor prolongs a trial. Documents
carry Unix times for display.

1. a guard is evaluated on what happened since the change: preemptions, and the inter-token times of
   the newest minute (`vtoken.runtime.latency` defines the window)
2. a p95 needs at least `MIN_INTERVALS` inter-token times, so that one outlier does not decide it
3. the quality canary's figures are those of requests that ran under the revision on trial from
   their first step to their last; a mean needs at least `Guard.canary_count` of them
4. a limit that has had no value in the entire trial was never evaluated. If the change is kept, its
   event and the answer to `confirm` name such limits
5. once a trial has ended, its verdict no longer changes
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vtoken.commands import PatchConfig
from vtoken.config.values import VTokenConfig
from vtoken.errors import RefusedError
from vtoken.runtime.latency import Histogram
from vtoken.wire import GUARD_SECONDS, CanaryFigures, Guard, Percentiles, Trial

MIN_INTERVALS = 20

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a trial: a time to confirm the change, a guard, or both."""

    confirm_within_s: int | None = None
    guard: Guard | None = None
    guard_for_s: int | None = None

    @staticmethod
    def of(call: PatchConfig) -> Terms | None:
        """The terms of a call, None if it has none; raises RefusedError."""
        guard = Guard(
            inter_token_p95_ms=call.guard_inter_token_p95_ms,
            preemptions=call.guard_preemptions,
            canary_agreement=call.guard_canary_agreement,
            canary_logprob_lost=call.guard_canary_logprob_lost,
        )
        on_canary = guards_canary(guard)
        guarded = guard.inter_token_p95_ms is not None or guard.preemptions is not None or on_canary
        if call.guard_for_s is not None and not guarded:
            raise RefusedError(
                "guard_for_s is the duration of a guard, but no guard is given",
                field="guard_for_s",
                value=call.guard_for_s,
                bound="only with another guard_… that sets a limit",
            )
        if call.guard_canary_count is not None:
            if not on_canary:
                raise RefusedError(
                    "guard_canary_count needs a guard on the canary, but none is given",
                    field="guard_canary_count",
                    value=call.guard_canary_count,
                    bound="only with guard_canary_agreement or guard_canary_logprob_lost",
                )
            guard.canary_count = call.guard_canary_count
        if call.confirm_within_s is None and not guarded:
            return None
        return Terms(call.confirm_within_s, guard if guarded else None, call.guard_for_s)

    def __str__(self) -> str:
        parts = []
        if self.confirm_within_s is not None:
            parts.append(f"confirm within {self.confirm_within_s} s")
        if self.guard is not None and self.guard.inter_token_p95_ms is not None:
            parts.append(f"reverted if p95 inter-token > {self.guard.inter_token_p95_ms:g} ms")
        if self.guard is not None and self.guard.preemptions is not None:
            parts.append(f"reverted if preemptions > {self.guard.preemptions}")
        if self.guard is not None and guards_canary(self.guard):
            bounds = [
                f"{name} {sign} {limit:g}"
                for name, sign, limit in (
                    ("agreement", "<", self.guard.canary_agreement),
                    ("log-probability lost", ">", self.guard.canary_logprob_lost),
                )
                if limit is not None
            ]
            over = f"over {self.guard.canary_count} canaries or more"
            parts.append(f"reverted if {' or '.join(bounds)} {over}")
        return ", ".join(parts)

    def require_canary(self, config: VTokenConfig) -> None:
        """Raises RefusedError if the guard uses the canary and `config` turns it off."""
        if self.guard is None or not guards_canary(self.guard) or config.canary.share > 0:
            return
        agreement = self.guard.canary_agreement
        on_agreement = agreement is not None
        raise RefusedError(
            "the guard is on the quality canary, which is off",
            field="guard_canary_agreement" if on_agreement else "guard_canary_logprob_lost",
            value=agreement if on_agreement else self.guard.canary_logprob_lost,
            bound="while canary.share > 0; the same change may set it",
        )


def guards_canary(guard: Guard) -> bool:
    """Whether `guard` has a limit on the quality canary."""
    return guard.canary_agreement is not None or guard.canary_logprob_lost is not None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended: through its deadline ("trial") or its "guard".

    `reason`: a sentence with the measured value and the limit.
    """

    by: Literal["trial", "guard"]
    reverts: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a guard, and the value that must not exceed it, or fall below if `is_lower`.

    `value`: None while it rests on too little, which `missing` describes. `error`: its standard
    error; `over`: what it is a mean of.
    """

    name: str
    limit: float
    value: float | None
    missing: str = ""
    error: float | None = None
    over: str = ""
    unit: str = ""
    digits: str = "g"
    is_lower: bool = False

    @property
    def violated(self) -> bool:
        if self.value is None:
            return False
        return self.value < self.limit if self.is_lower else self.value > self.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} not evaluated, {self.missing}"
        signs = ("<", ">=") if self.is_lower else (">", "<=")
        sign = signs[0] if self.violated else signs[1]
        error = "" if self.error is None else f" ± {self.error:.2g}"
        value = f"{self.value:{self.digits}}{error}{self.unit}"
        return f"{self.name} {value} {sign} {self.limit:g}{self.unit}{self.over}"


class RunningTrial:
    """One revision on trial.

    `preemptions`: the counter's value at the change; `verdict` takes its current value. `gaps`: the
    inter-token times since the change, None if no guard uses them. `canary(revision)` returns the
    quality canary's current figures of a revision.
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
        canary: Callable[[int], CanaryFigures],
        clock: Clock,
    ) -> None:
        self._terms = terms
        self._canary = canary
        self._clock = clock
        self.gaps = gaps
        self._preemptions = preemptions
        now, started_ts = clock(), time.time()
        within, lasts = terms.confirm_within_s, None
        if terms.guard is not None:
            lasts = terms.guard_for_s or within or GUARD_SECONDS
        self._expires = None if within is None else now + within
        self._guard_until = None if lasts is None else now + lasts
        self.unevaluated: list[str] = []  # names of limits that had no value yet
        self.document = Trial(
            revision=revision,
            actor=actor,
            started_ts=started_ts,
            expires_ts=None if within is None else started_ts + within,
            guard=terms.guard,
            guard_until_ts=None if lasts is None else started_ts + lasts,
            changes=changes,
        )
        if terms.guard is not None:
            self.unevaluated = [limit.name for limit in self._limits(0)]

    def verdict(self, preemptions: int) -> Verdict | None:
        """How the trial ended; None while it runs. An expiring guard is evaluated once more."""
        now = self._clock()
        if self._guard_until is not None:
            limits = self._limits(preemptions - self._preemptions)
            missing = {limit.name for limit in limits if limit.value is None}
            self.unevaluated = [name for name in self.unevaluated if name in missing]
            for limit in limits:
                if limit.violated:
                    return Verdict("guard", True, str(limit))
            if now >= self._guard_until and self._expires is None:
                seconds = self._terms.guard_for_s or GUARD_SECONDS
                held = f"held for {seconds} s"
                if self.unevaluated:
                    is_part = len(self.unevaluated) < len(limits)
                    how = "evaluated only in part" if is_part else "never evaluated"
                    held = f"was {how} in {seconds} s"
                values = ", ".join(map(str, limits))
                return Verdict("guard", False, f"its guard {held}: {values}")
            if now >= self._guard_until:
                self._guard_until = None
        if self._expires is not None and now >= self._expires:
            within = self._terms.confirm_within_s
            return Verdict("trial", True, f"not confirmed within {within} s")
        return None

    def _limits(self, preemptions: int) -> list[Limit]:
        """Every limit of the guard, with its value now."""
        guard, limits = self._terms.guard, []
        assert guard is not None
        if guard.inter_token_p95_ms is not None:
            p95 = None if self.gaps is None else guard_p95_ms(self.gaps.window(self._clock()))
            few = f"fewer than {MIN_INTERVALS} gaps in a minute"
            limits.append(Limit("p95 inter-token", guard.inter_token_p95_ms, p95, few, unit=" ms"))
        if guard.preemptions is not None:
            limits.append(Limit("preemptions", guard.preemptions, preemptions))
        if guards_canary(guard):
            limits += _canary_limits(guard, self._canary(self.document.revision))
        return limits


def _canary_limits(guard: Guard, figures: CanaryFigures) -> list[Limit]:
    """The guard's limits on the means of the quality canary, `figures`."""
    agreement, lost = figures.agreement, figures.logprob_lost
    means = (
        ("agreement", guard.canary_agreement, agreement, figures.agreement_se),
        ("log-probability lost", guard.canary_logprob_lost, lost, figures.logprob_lost_se),
    )
    limits = []
    for name, limit, mean, error in means:
        if limit is None:
            continue
        is_lower = name == "agreement"
        count = figures.greedy_count if is_lower else figures.count
        limits.append(
            Limit(
                name,
                limit,
                mean if count >= guard.canary_count else None,
                f"{count} of {guard.canary_count} canaries",
                error,
                over=f" over {count} canaries",
                digits=".3g",
                is_lower=is_lower,
            )
        )
    return limits


def guard_p95_ms(gaps: Percentiles) -> float | None:
    """The p95 that a guard uses, in ms to three digits; None with fewer than `MIN_INTERVALS`."""
    if gaps.count < MIN_INTERVALS or gaps.p95_ms is None:
        return None
    return float(f"{gaps.p95_ms:.3g}")
