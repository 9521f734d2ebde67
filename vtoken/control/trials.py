"""A change on trial: the deadline for its confirmation, and the guards that revert it.

Time is monotonic, so a jump of the wall clock neither shortens nor prolongs a trial. Documents
carry Unix times for display.

1. guards are evaluated on what happened since the change, see `vtoken.control.guard_watch`
2. a value that rests on fewer samples than its guard asks for is not evaluated, so that one
   outlier does not decide a trial
3. a guard that has had no value in the entire trial was never evaluated. If the change is kept, its
   event and the answer to `confirm` name such guards
4. once a trial has ended, its verdict no longer changes
"""

from __future__ import annotations

import time
from typing import Any

from msgspec import structs

from vtoken.base.errors import RefusedError
from vtoken.control.guard_watch import Clock, GuardWatch
from vtoken.core.config.values import VTokenConfig
from vtoken.wire import GUARD_SECONDS, Guard, Trial, TrialEnd
from vtoken.wire.commands import PatchConfig
from vtoken.wire.guards import checked, guard_text, series_of


def terms_of(call: PatchConfig, config: VTokenConfig) -> PatchConfig:
    """A call that asks for a trial, with its guards' full names and defaults.

    `config`: what it changes to. Raises RefusedError.
    """
    guards = checked(call.guards)
    if call.guard_for_s is not None and not guards:
        raise RefusedError(
            "guard_for_s is the duration of guards, but no guard is given",
            field="guard_for_s",
            value=call.guard_for_s,
            bound="only with guards",
        )
    for guard in guards:
        _require_value(guard, config)
    return structs.replace(call, guards=guards)


def terms_text(terms: PatchConfig) -> str:
    """`confirm within 60 s, reverted if preemptions > 0`."""
    parts = []
    if terms.confirm_within_s is not None:
        parts.append(f"confirm within {terms.confirm_within_s} s")
    parts += [f"reverted if {guard_text(guard)}" for guard in terms.guards]
    return ", ".join(parts)


def _require_value(guard: Guard, config: VTokenConfig) -> None:
    """Raises RefusedError if the guard's metric can have no value under `config`."""
    series = series_of(guard.metric)
    setting: Any = config
    for name in series.metric.needs.split("."):
        setting = getattr(setting, name) if name else True
    if not setting:
        unset = "empty" if setting == "" else "0"
        raise RefusedError(
            f"{series} has no value while {series.metric.needs} is {unset}",
            field="guards",
            value=guard.metric,
            bound=f"once {series.metric.needs} is set; the same change may set it",
        )


class RunningTrial:
    """One revision on trial, from its change until `close`.

    `terms`: see `terms_of`; `watch`: reads their guards.
    """

    def __init__(
        self,
        terms: PatchConfig,
        *,
        revision: int,
        actor: str,
        changes: dict[str, list[Any]],
        watch: GuardWatch,
        clock: Clock,
    ) -> None:
        self._terms = terms
        self._clock = clock
        self._watch = watch
        now, started_ts = clock(), time.time()
        within = terms.confirm_within_s
        lasts = (terms.guard_for_s or within or GUARD_SECONDS) if terms.guards else None
        self.unevaluated = [limit.name for limit in watch.limits()]  # guards without a value yet
        self._expires = None if within is None else now + within
        self._guard_until = None if lasts is None else now + lasts
        self.document = Trial(
            revision=revision,
            actor=actor,
            started_ts=started_ts,
            expires_ts=None if within is None else started_ts + within,
            guard_until_ts=None if lasts is None else started_ts + lasts,
            changes=changes,
            guards=[*terms.guards],
            engines=[*terms.engines],
            followers=[*terms.followers],
        )

    def close(self) -> None:
        self._watch.close()

    def guards(self) -> list[Guard]:
        """The guards that are still active, with their values now."""
        if self._guard_until is None:
            return []
        return [limit.document() for limit in self._watch.limits()]

    def confirmed(self, actor: str) -> TrialEnd:
        """The end of a trial that `actor` confirms."""
        return self._kept(actor, confirmed=self.document.revision)

    def end(self) -> TrialEnd | None:
        """How the trial ended; None while it runs. Expiring guards are evaluated once more."""
        now = self._clock()
        if self._guard_until is not None:
            limits = self._watch.limits()
            missing = {limit.name for limit in limits if not limit.evaluated}
            self.unevaluated = [name for name in self.unevaluated if name in missing]
            for limit in limits:
                if limit.crossed:
                    return self._reverted("guard", str(limit))
            if now >= self._guard_until and self._expires is None:
                seconds = self._terms.guard_for_s or GUARD_SECONDS
                held = f"held for {seconds} s"
                if self.unevaluated:
                    is_part = len(self.unevaluated) < len(limits)
                    how = "evaluated only in part" if is_part else "never evaluated"
                    held = f"was {how} in {seconds} s"
                values = ", ".join(map(str, limits))
                return self._kept(
                    "guard",
                    kept=self.document.revision,
                    reason=f"its guard {held}: {values}",
                    unevaluated=self.unevaluated,
                )
            if now >= self._guard_until:
                self._guard_until = None
        if self._expires is not None and now >= self._expires:
            within = self._terms.confirm_within_s
            return self._reverted("trial", f"not confirmed within {within} s")
        return None

    def _reverted(self, actor: str, reason: str) -> TrialEnd:
        trial = self.document
        return TrialEnd(actor=actor, reverted=trial.revision, reason=reason, engines=trial.engines)

    def _kept(self, actor: str, **how: Any) -> TrialEnd:
        trial = self.document
        patch = {name: new for name, (_, new) in trial.changes.items()} if trial.followers else {}
        return TrialEnd(actor=actor, followers=trial.followers, patch=patch, **how)
