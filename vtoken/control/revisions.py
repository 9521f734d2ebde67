"""The revisions of one engine's configuration: changes, undo, and the trial of the newest one.

Knows the runtime and trials, not commands. Invariants:
1. every change is a new revision with an event, in force as a whole from the next step on
2. a revision that was replaced before a step ran with it is said to be overtaken
3. one revision is on trial at most, the newest; until that is over nothing else changes
4. the engine ends a trial itself: whoever began it may be gone
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vtoken.config.descriptions import told_changes, waiting_notes
from vtoken.config.values import VTokenConfig, bounds, diff
from vtoken.control.scheduling import Scheduling
from vtoken.control.trials import Clock, RunningTrial, Terms, judged_p95
from vtoken.control.whatif import what_if
from vtoken.errors import RefusedError, StaleRevisionError
from vtoken.runtime.runtime import Runtime
from vtoken.runtime.scoring import swap_notes
from vtoken.wire import ConfigDocument, PatchResult

MAX_HISTORY = 64


@dataclass(slots=True)
class _Story:
    """How a change is told: `{told}` stands for what changed and by whom."""

    summary: str = "{told}"
    data: dict[str, Any] = field(default_factory=dict)


class Revisions:
    """Changes the configuration of one runtime; `clock` is the one that tells it of tokens."""

    def __init__(
        self, runtime: Runtime, scheduling: Scheduling, clock: Clock = time.monotonic
    ) -> None:
        self._runtime = runtime
        self._scheduling = scheduling
        self._clock = clock
        self._history: list[VTokenConfig] = []
        self._trial: RunningTrial | None = None
        self._told: tuple[tuple[Any, ...], ConfigDocument] | None = None

    def document(self) -> ConfigDocument:
        """The configuration as it stands; not to be written: the same until something changes."""
        runtime = self._runtime
        trial = None if self._trial is None else self._trial.document
        state = (runtime.config, runtime.state.revision, *runtime.state.effective, trial)
        if self._told is None or self._told[0] != state:
            effective, revision = runtime.state.effective
            geometry = runtime.geometry
            document = ConfigDocument(
                revision=runtime.state.revision,
                desired=runtime.config.values(),
                effective=effective.values(),
                bounds=bounds(geometry.num_blocks, geometry.num_layers, geometry.num_heads),
                effective_revision=revision,
                trial=trial,
            )
            self._told = state, document
        return self._told[1]

    # ------------------------------------------------------------ asking

    def require(self, expected: int) -> None:
        """Raises StaleRevisionError unless `expected` is the newest revision."""
        if expected != self._runtime.state.revision:
            raise StaleRevisionError(expected, self._runtime.state.revision)

    def require_no_trial(self) -> None:
        """Raises RefusedError while a revision is on trial."""
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

    def require_trial(self) -> None:
        """Raises RefusedError unless a revision is on trial."""
        if self._trial is None:
            raise RefusedError(
                "no change is on trial: it was reverted, or kept, or never began",
                field="confirm",
                bound="while GET /vtoken/v1/config shows a trial",
                status=409,
                title="Nothing on trial",
            )

    def require_history(self) -> None:
        """Raises RefusedError unless there is something to undo."""
        if not self._history:
            raise RefusedError(
                "there is no earlier configuration",
                field="undo",
                bound=f"at most {MAX_HISTORY} steps back",
                status=409,
                title="Nothing to undo",
            )

    def outlook(self, config: VTokenConfig, terms: Terms | None = None) -> PatchResult:
        """What a change to `config` would do; nothing is changed."""
        if terms is not None:
            terms.require_canary(config)
        notes = self.notes(config, terms)
        if self._trial is not None:
            notes.append(
                f"revision {self._runtime.state.revision} is on trial: refused until that has ended"
            )
        return self._outlook(config, notes)

    def outlook_of_undo(self) -> PatchResult:
        """What `undo` would do; nothing is changed."""
        self.require_history()
        notes = self.notes(self._history[-1])
        if self._trial is not None:
            notes.append(f"it ends the trial of revision {self._runtime.state.revision}")
        return self._outlook(self._history[-1], notes)

    def outlook_of_confirm(self) -> PatchResult:
        """What `confirm` would do; nothing is changed."""
        self.require_trial()
        told = f"revision {self._runtime.state.revision} would be confirmed and stay"
        return self._outlook(self._runtime.config, [told])

    def _outlook(self, config: VTokenConfig, notes: list[str]) -> PatchResult:
        runtime = self._runtime
        changes = diff(runtime.config.values(), config.values())
        result = self._answer(runtime.config, changes, notes)
        result.applied_at_step, result.outcome = None, "dry_run"
        result.overtaken = self._overtaken() if changes else None
        result.what_if = what_if(runtime, config)
        return result

    def notes(self, config: VTokenConfig, terms: Terms | None = None) -> list[str]:
        """What a change to `config` means, in words: for the scores held, for what it overtakes.

        And what speaks against `terms` already now.
        """
        runtime = self._runtime
        notes = swap_notes(runtime.config, config, runtime.scoring.resolve)
        notes += waiting_notes(runtime.config, config)
        overtaken = self._overtaken()
        if overtaken is not None:
            notes.append(f"revision {overtaken} is overtaken: no step has run with it")
        guard = None if terms is None else terms.guard
        limit = None if guard is None else guard.inter_token_p95_ms
        p95 = judged_p95(runtime.latency.inter_token(self._clock()))
        if limit is not None and p95 is not None and p95 > limit:
            notes.append(f"p95 inter-token is {p95:g} ms before the change, the guard {limit:g} ms")
        return notes

    def _overtaken(self) -> int | None:
        """The newest revision, if no step has run with it yet."""
        revision = self._runtime.state.revision
        return None if self._runtime.state.effective[1] == revision else revision

    # ------------------------------------------------------------ changing

    def change(self, config: VTokenConfig, actor: str, terms: Terms | None = None) -> PatchResult:
        """A new revision, on trial if there are `terms`; none when `config` changes nothing.

        The caller asked `require_no_trial` first.
        """
        if terms is not None:
            terms.require_canary(config)
        before = self._runtime.config
        story = _Story("{told}" if terms is None else f"{{told}}, on trial: {terms}")
        result = self._install(config, actor, story, terms)
        if result.changes:
            self._history = [*self._history[-MAX_HISTORY + 1 :], before]
        elif terms is not None:
            result.notes.append("nothing changes, so nothing is on trial")
        return result

    def undo(self, actor: str) -> PatchResult:
        """A new revision with the configuration before the newest one; ends its trial."""
        self.require_history()
        story, undone = _Story(), self._runtime.state.revision
        if self._trial is not None:
            story.summary = f"{{told}}, which ends the trial of rev {undone}"
            self._leave_trial()
        return self._install(self._history.pop(), actor, story)

    def confirm(self, actor: str) -> PatchResult:
        """Keep what is on trial; the revision stays the same."""
        self.require_trial()
        revision = self._runtime.state.revision
        self._end_trial(actor, f"rev {revision} confirmed by {actor}", {"confirmed": revision})
        result = self._answer(self._runtime.config, {})
        result.notes.append(f"revision {revision} is confirmed and stays")
        return result

    def check_trial(self) -> None:
        """End the trial when its time is over or its guard is passed; costs little, ask often."""
        if self._trial is None:
            return
        verdict = self._trial.verdict(self._scheduling.num_preemptions)
        if verdict is None:
            return
        revision = self._runtime.state.revision
        if not verdict.reverts:
            data = {"kept": revision, "reason": verdict.reason}
            self._end_trial(verdict.by, f"rev {revision} is kept: {verdict.reason}", data)
            return
        self._leave_trial()
        data = {"reverted": revision, "reason": verdict.reason}
        story = _Story(f"reverted: {verdict.reason}; {{told}}", data)
        self._install(self._history.pop(), verdict.by, story)

    def _end_trial(self, actor: str, summary: str, data: dict[str, Any]) -> None:
        """The revision stays."""
        self._leave_trial()
        runtime = self._runtime
        about = {"revision": runtime.state.revision, "actor": actor, "changes": {}, "notes": []}
        runtime.events.add(runtime.step + 1, "config", summary, about | data)

    def _install(
        self, config: VTokenConfig, actor: str, story: _Story, terms: Terms | None = None
    ) -> PatchResult:
        runtime, before = self._runtime, self._runtime.config
        changes = diff(before.values(), config.values())
        if not changes:
            return self._answer(before, changes)
        notes, overtaken = self.notes(config, terms), self._overtaken()
        runtime.state.install(config)
        result = self._answer(before, changes, notes)
        result.overtaken = overtaken
        data: dict[str, Any] = {
            "revision": runtime.state.revision,
            "actor": actor,
            "changes": result.changes,
            "notes": result.notes,
        }
        if overtaken is not None:
            data["overtaken"] = overtaken
        if terms is not None:
            self._begin_trial(terms, actor, result)
            data["trial"] = msgspec.to_builtins(result.trial)
        told = f"{told_changes(changes)} by {actor} (rev {runtime.state.revision})"
        summary = story.summary.replace("{told}", told)
        runtime.events.add(runtime.step + 1, "config", summary, data | story.data)
        return result

    def _begin_trial(self, terms: Terms, actor: str, result: PatchResult) -> None:
        guarded = terms.guard is not None and terms.guard.inter_token_p95_ms is not None
        self._trial = RunningTrial(
            terms,
            revision=result.revision,
            actor=actor,
            changes=result.changes,
            preemptions=self._scheduling.num_preemptions,
            gaps=self._runtime.latency.watch() if guarded else None,
            canary=self._runtime.canary.of_revision,
            clock=self._clock,
        )
        result.trial = self._trial.document

    def _leave_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None and trial.gaps is not None:
            self._runtime.latency.unwatch(trial.gaps)

    def _answer(
        self, previous: VTokenConfig, changes: dict[str, list[Any]], notes: list[str] | None = None
    ) -> PatchResult:
        """What is so now, after a call that found `previous` and made `changes`."""
        runtime = self._runtime
        effective, revision = runtime.state.effective
        in_force = revision == runtime.state.revision
        return PatchResult(
            revision=runtime.state.revision,
            applied_at_step=runtime.step + 1,
            previous=previous.values(),
            effective=effective.values(),
            changes=changes,
            notes=notes or [],
            desired=runtime.config.values(),
            effective_revision=revision,
            outcome="unchanged" if not changes else "in_force" if in_force else "accepted",
        )
