"""The revisions of one engine's configuration: changes, undo, and the trial of the newest one.

Invariants:
1. every change is a new revision with an event, applied atomically from the next step on
2. a revision that is replaced before a step ran with it is reported as superseded (`overtaken`)
3. at most one revision is on trial, the newest; nothing else changes until its trial ends
4. the engine ends a trial itself, since the client that began it may have disconnected
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import msgspec

from vtoken.base.errors import RefusedError, StaleRevisionError
from vtoken.control.dry_runs import DryRuns
from vtoken.control.guard_watch import Clock, GuardWatch, limit_now
from vtoken.control.outlook import Outlook
from vtoken.control.status import FINDING_S, EngineStatus
from vtoken.control.trials import RunningTrial, terms_of, terms_text
from vtoken.core.config.descriptions import inactive_notes, mode_notes, swap_notes
from vtoken.core.config.values import VTokenConfig, bounds, merge_patch
from vtoken.sentences import change_text, counted, drafts_text
from vtoken.wire import (
    Accepted,
    ConfigDocument,
    Guard,
    Made,
    PatchResult,
    TrialEnd,
    config_changes,
    void_settings,
)
from vtoken.wire.commands import ConfigCall, Confirm, PatchConfig, Undo
from vtoken.wire.guards import series_of

OF_SCORES = ("policy", "shadow", "probe")  # settings that scores depend on
FLOOR = frozenset({"budget_tokens", "budget_ratio", "budget_floor_tokens"})
EVICTING = FLOOR | {"policy", "evict_when", "evict_during", "interval_tokens"}
MAX_HISTORY = 64


class Revisions:
    """Changes the configuration of one runtime; `clock` must be the one of its latencies."""

    def __init__(self, engine: EngineStatus, dry_runs: DryRuns, clock: Clock) -> None:
        self._engine = engine
        self._runtime = engine.runtime
        self._active = engine.runtime.active
        self._dry_runs = dry_runs
        self._clock = clock
        self._history: list[VTokenConfig] = []
        self._trial: RunningTrial | None = None
        self._made: Made | None = None
        self._cached: tuple[tuple[Any, ...], ConfigDocument] | None = None

    def document(self) -> ConfigDocument:
        """The current configuration. It is cached until something changes: do not write to it."""
        runtime = self._runtime
        trial = None if self._trial is None else self._trial.document
        state = (self._active.config, self._active.revision, *runtime.effective, trial)
        if self._cached is None or self._cached[0] != state:
            effective, revision = runtime.effective
            geometry = runtime.geometry
            document = ConfigDocument(
                revision=self._active.revision,
                desired=self._active.config.values(),
                effective=effective.values(),
                bounds=bounds(geometry.num_blocks, geometry.num_layers, geometry.num_heads),
                effective_revision=revision,
                trial=trial,
                made=self._made,
            )
            self._cached = state, document
        return self._cached[1]

    def guards(self) -> list[Guard]:
        """The guards of the running trial with their values now; empty without one."""
        return [] if self._trial is None else self._trial.guards()

    # ------------------------------------------------------------ asking

    def validate(self, call: ConfigCall) -> Accepted:
        """What `call` would change if it came now; raises RefusedError if it would be refused."""
        config = self._config_of(call)
        if isinstance(call, PatchConfig):
            _terms_of(call, config)
            self._require_no_trial()
        return Accepted(self._active.revision, self._changes(config))

    def preview(self, call: ConfigCall) -> PatchResult:
        """What `call` would do; raises RefusedError, but not while a revision is on trial."""
        config, revision = self._config_of(call), self._active.revision
        changes = self._changes(config)
        match call:
            case PatchConfig():
                notes = self._notes(config, changes, _terms_of(call, config))
                refused = f"refused while revision {revision} is on trial: confirm or undo it first"
                return self._preview(config, changes, [*notes, refused] if self._trial else notes)
            case Undo():
                notes = self._notes(config, changes)
                ends = f"it ends the trial of revision {revision}"
                return self._preview(config, changes, [*notes, ends] if self._trial else notes)
            case Confirm():
                note = f"revision {revision} would be confirmed and stay"
                return self._preview(config, changes, [note, *self._without_evidence()])
        assert_never(call)

    def _config_of(self, call: ConfigCall) -> VTokenConfig:
        """The configuration after `call`. Raises RefusedError, also for a stale `if_match`."""
        runtime, newest = self._runtime, self._active.revision
        if call.if_match is not None and call.if_match != newest:
            raise StaleRevisionError(call.if_match, newest)
        match call:
            case PatchConfig():
                geometry = runtime.geometry
                config = merge_patch(
                    self._active.config,
                    call.patch,
                    num_blocks=geometry.num_blocks,
                    num_layers=geometry.num_layers,
                    num_heads=geometry.num_heads,
                )
                before = self._active.config
                if (config.policy, config.shadow) != (before.policy, before.shadow):
                    runtime.ranking.require_all(config)
                return config
            case Undo():
                if not self._history:
                    raise RefusedError(
                        "there is no earlier configuration",
                        field="undo",
                        bound=f"at most {MAX_HISTORY} steps back",
                        status=409,
                        title="Nothing to undo",
                    )
                return self._history[-1]
            case Confirm():
                if self._trial is None:
                    raise RefusedError(
                        "no change is on trial: it was reverted, kept or never started",
                        field="confirm",
                        bound="while GET /vtoken/v1/config shows a trial",
                        status=409,
                        title="Nothing on trial",
                    )
                return self._active.config
        assert_never(call)

    def _require_new(self, revision: int | None) -> None:
        newest = self._active.revision
        if revision is not None and revision <= newest:
            raise RefusedError(
                f"revision {revision} is not new",
                field="revision",
                value=revision,
                bound=f"above {newest}",
                status=409,
            )

    def _require_no_trial(self) -> None:
        if self._trial is not None:
            trial = self._trial.document
            raise RefusedError(
                f"revision {trial.revision} by {trial.actor} is on trial; "
                "end it first: confirm keeps it, undo takes it back",
                field="trial",
                value=trial.revision,
                bound="one change on trial at a time",
                status=409,
                title="On trial",
            )

    def _without_evidence(self) -> list[str]:
        """A note on the guards of the running trial that were never evaluated, if any."""
        names = [] if self._trial is None else self._trial.unevaluated
        return [f"its guard had no evidence for {', '.join(names)}"] if names else []

    def _changes(self, config: VTokenConfig) -> dict[str, list[Any]]:
        """What differs from the current configuration to `config`: field -> [old, new]."""
        return config_changes(self._active.config.values(), config.values())

    def _preview(
        self, config: VTokenConfig, changes: dict[str, list[Any]], notes: list[str]
    ) -> PatchResult:
        runtime = self._runtime
        result = self._result(self._active.config, changes, notes)
        result.applied_at_step, result.outcome = None, "dry_run"
        result.overtaken = self._superseded() if changes else None
        result.what_if = found = self._dry_runs.what_if(config)
        gives = config.gives and len(runtime.tables) > 0
        in_force = changes.keys() - void_settings(config).keys()
        if gives and found.givable_blocks == 0 and not in_force.isdisjoint(FLOOR):
            result.notes.append("no running request can give: none has a block above this floor")
        if "evict_after_wait_ms" in changes:
            note = Outlook(runtime, config).patience_note()
            result.notes += [] if note is None else [note]
        drafts = runtime.drafts.document()
        if drafts and not in_force.isdisjoint(EVICTING):
            result.notes.append(
                f"drafts: {drafts_text(drafts)}; a lower share is slower, not wrong"
            )
        return result

    def _notes(
        self, config: VTokenConfig, changes: Mapping[str, Any], terms: PatchConfig | None = None
    ) -> list[str]:
        """Notes on `changes` to `config`: scores that are dropped, values without effect, a
        superseded revision, guards of `terms` that are crossed already.
        """
        before = self._active.config
        notes = inactive_notes(changes, config)
        if not changes.keys().isdisjoint(OF_SCORES):
            notes = swap_notes(before, config, self._runtime.ranking.resolve) + notes
        notes += mode_notes(before, config)
        superseded = self._superseded()
        if superseded is not None:
            notes.append(f"revision {superseded} is superseded: no step has run with it")
        return notes + self._crossed_before(() if terms is None else terms.guards)

    def _crossed_before(self, guards: Sequence[Guard]) -> list[str]:
        """A note on each guard whose limit the engine crosses already."""
        notes: list[str] = []
        if not guards:
            return notes
        status = self._engine.status()
        status.latency = self._runtime.latency.document(self._clock())
        for guard in guards:
            series = series_of(guard.metric)
            if series.metric.kind == "counter":
                continue
            limit = limit_now(guard, series, status)
            if limit.crossed:
                value, bound = limit.shown()
                side = "above" if guard.below is None else "below"
                notes.append(
                    f"{limit.name} is {value} before the change, {side} the guard of {bound}"
                )
        return notes

    def _superseded(self) -> int | None:
        """The newest revision, if no step has run with it yet."""
        revision = self._active.revision
        return None if self._runtime.effective[1] == revision else revision

    # ------------------------------------------------------------ changing

    def make(self, call: ConfigCall, actor: str) -> PatchResult:
        """Make a change; a patch that asks for a trial is on trial. Raises RefusedError.

        `revision` of a call is the number of a change that several engines make; it must be new.
        """
        config = self._config_of(call)
        match call:
            case PatchConfig():
                return self._patch(config, call, actor)
            case Undo():
                return self._undo(config, actor, call.revision)
            case Confirm():
                return self._confirm(actor)
        assert_never(call)

    def _patch(self, config: VTokenConfig, call: PatchConfig, actor: str) -> PatchResult:
        """A new revision; none when `config` changes nothing."""
        terms = _terms_of(call, config)
        self._require_no_trial()
        self._require_new(call.revision)
        before = self._active.config
        result = self._install(config, actor, terms, revision=call.revision)
        if result.changes:
            self._history = [*self._history[-MAX_HISTORY + 1 :], before]
        elif terms is not None:
            result.notes.append("nothing changes, so nothing is on trial")
        return result

    def _undo(self, config: VTokenConfig, actor: str, revision: int | None) -> PatchResult:
        """A new revision with the configuration before the newest one; ends its trial."""
        self._require_new(revision)
        ended = ""
        if self._trial is not None:
            ended = f", which ends the trial of rev {self._active.revision}"
            self._leave_trial()
        self._history.pop()
        return self._install(config, actor, after=ended, revision=revision)

    def _confirm(self, actor: str) -> PatchResult:
        """Keep the revision that is on trial; its number stays."""
        assert self._trial is not None
        revision, notes = self._active.revision, self._without_evidence()
        end = self._trial.confirmed(actor)
        self._leave_trial()
        self._add_event(actor, f"rev {revision} confirmed by {actor}", _data_of(end, notes=notes))
        note = f"revision {revision} is confirmed and stays"
        return self._result(self._active.config, {}, [note, *notes])

    def check_trial(self) -> None:
        """End the trial if its time is over or a guard is crossed; called before every step."""
        end = None if self._trial is None else self._trial.end()
        if end is None:
            return
        self._leave_trial()
        if end.reverted is None:
            revision = self._active.revision
            self._add_event(end.actor, f"rev {revision} is kept: {end.reason}", _data_of(end))
        else:
            before = f"reverted: {end.reason}; "
            self._install(self._history.pop(), end.actor, before=before, data=_data_of(end))

    def _install(
        self,
        config: VTokenConfig,
        actor: str,
        terms: PatchConfig | None = None,
        *,
        before: str = "",
        after: str = "",
        data: dict[str, Any] | None = None,
        revision: int | None = None,
    ) -> PatchResult:
        """`before`, `after`: around the change in the event's summary; `data`: of the event."""
        previous = self._active.config
        changes = self._changes(config)
        if not changes:
            return self._result(previous, changes)
        notes, superseded = self._notes(config, changes, terms), self._superseded()
        if lost := self._runtime.parking.lost_by(config.park_bytes):
            verb = "loses its copy" if lost == 1 else "lose their copies"
            notes.append(f"{counted(lost, 'parked token')} {verb}, and cannot come back")
        self._active.install(config, revision)
        self._runtime.restorer.after_guard = actor == "guard"
        self._made = Made(actor, time.time(), [*changes])
        if "reclamation" in changes:
            facts = self._engine.facts
            facts.reclamation_by, facts.reclamation_since_ts = actor, time.time()
        result = self._result(previous, changes, notes)
        result.overtaken = superseded
        data = {"changes": result.changes, "notes": result.notes, **(data or {})}
        if superseded is not None:
            data["overtaken"] = superseded
        if terms is not None:
            self._begin_trial(terms, actor, result)
            data["trial"] = msgspec.to_builtins(result.trial)
            after = f", on trial: {terms_text(terms)}"
        change = f"{change_text(changes)} by {actor} (rev {self._active.revision})"
        self._add_event(actor, f"{before}{change}{after}", data)
        return result

    def _add_event(self, actor: str, summary: str, data: dict[str, Any]) -> None:
        runtime = self._runtime
        common = {"revision": self._active.revision, "actor": actor, "changes": {}, "notes": []}
        runtime.events.add(runtime.step + 1, "config", summary, common | data)

    def _begin_trial(self, terms: PatchConfig, actor: str, result: PatchResult) -> None:
        engine, clock = self._engine, self._clock
        status = partial(engine.status, max_age_s=FINDING_S)
        watch = GuardWatch(terms.guards, result.revision, engine.scheduling, status, clock)
        self._trial = RunningTrial(
            terms,
            revision=result.revision,
            actor=actor,
            changes=result.changes,
            watch=watch,
            clock=clock,
        )
        result.trial = self._trial.document

    def _leave_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.close()

    def _result(
        self, previous: VTokenConfig, changes: dict[str, list[Any]], notes: list[str] | None = None
    ) -> PatchResult:
        """The state after a call that replaced `previous` by making `changes`."""
        runtime = self._runtime
        effective, revision = runtime.effective
        in_force = revision == self._active.revision
        return PatchResult(
            revision=self._active.revision,
            applied_at_step=runtime.step + 1,
            previous=previous.values(),
            effective=effective.values(),
            changes=changes,
            notes=notes or [],
            desired=self._active.config.values(),
            effective_revision=revision,
            outcome="unchanged" if not changes else "in_force" if in_force else "accepted",
        )


def _terms_of(call: PatchConfig, config: VTokenConfig) -> PatchConfig | None:
    """The terms of the trial that `call` asks for, None for none; raises RefusedError."""
    return terms_of(call, config) if call.asks_for_trial else None


def _data_of(end: TrialEnd, **more: Any) -> dict[str, Any]:
    """The data of the event of a trial's end."""
    data: dict[str, Any] = msgspec.to_builtins(end)
    return data | more
