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

from vtoken.config import VTokenConfig, bounds, diff
from vtoken.errors import RefusedError, StaleRevisionError
from vtoken.runtime import Runtime
from vtoken.scoring import swap_notes
from vtoken.trials import Clock, RunningTrial, Terms, judged_p95
from vtoken.wire import ConfigDocument, PatchResult

MAX_HISTORY = 64


@dataclass(slots=True)
class _Story:
    """How a change is told: `{told}` stands for what changed and by whom."""

    summary: str = "{told}"
    data: dict[str, Any] = field(default_factory=dict)


class Revisions:
    """Changes the configuration of one runtime; `clock` is the one that tells it of tokens."""

    def __init__(self, runtime: Runtime, clock: Clock = time.monotonic) -> None:
        self._runtime = runtime
        self._clock = clock
        self._history: list[VTokenConfig] = []
        self._trial: RunningTrial | None = None

    def document(self) -> ConfigDocument:
        runtime = self._runtime
        effective, revision = runtime.effective
        return ConfigDocument(
            revision=runtime.revision,
            desired=runtime.config.values(),
            effective=effective.values(),
            bounds=bounds(runtime.geometry.num_blocks, runtime.geometry.num_layers),
            effective_revision=revision,
            trial=None if self._trial is None else self._trial.document,
        )

    # ------------------------------------------------------------ asking

    def require(self, expected: int) -> None:
        """Raises StaleRevisionError unless `expected` is the newest revision."""
        if expected != self._runtime.revision:
            raise StaleRevisionError(expected, self._runtime.revision)

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

    def notes(self, config: VTokenConfig, terms: Terms | None = None) -> list[str]:
        """What a change to `config` means, in words: for the scores held, for what it overtakes.

        And what speaks against `terms` already now.
        """
        runtime = self._runtime
        notes = swap_notes(runtime.config, config, runtime.geometry.num_layers // 2)
        notes += _waiting_notes(runtime.config, config)
        overtaken = self._overtaken()
        if overtaken is not None:
            notes.append(f"revision {overtaken} is overtaken: no step has run with it")
        if self._trial is not None:
            notes.append(f"revision {runtime.revision} is on trial: refused until that has ended")
        guard = None if terms is None else terms.guard
        limit = None if guard is None else guard.inter_token_p95_ms
        p95 = judged_p95(runtime.latency.inter_token(self._clock()))
        if limit is not None and p95 is not None and p95 > limit:
            notes.append(f"p95 inter-token is {p95:g} ms before the change, the guard {limit:g} ms")
        return notes

    def _overtaken(self) -> int | None:
        """The newest revision, if no step has run with it yet."""
        revision = self._runtime.revision
        return None if self._runtime.effective[1] == revision else revision

    # ------------------------------------------------------------ changing

    def change(self, config: VTokenConfig, actor: str, terms: Terms | None = None) -> PatchResult:
        """A new revision, on trial if there are `terms`; none when `config` changes nothing.

        The caller asked `require_no_trial` first.
        """
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
        if not self._history:
            raise RefusedError(
                "there is no earlier configuration",
                field="undo",
                bound=f"at most {MAX_HISTORY} steps back",
                status=409,
                title="Nothing to undo",
            )
        story, undone = _Story(), self._runtime.revision
        if self._trial is not None:
            story.summary = f"{{told}}, which ends the trial of rev {undone}"
            self._leave_trial()
        return self._install(self._history.pop(), actor, story)

    def confirm(self, actor: str) -> PatchResult:
        """Keep what is on trial; the revision stays the same."""
        if self._trial is None:
            raise RefusedError(
                "no change is on trial: it was reverted, or kept, or never began",
                field="confirm",
                bound="while GET /vtoken/v1/config shows a trial",
                status=409,
                title="Nothing on trial",
            )
        revision = self._runtime.revision
        told = f"revision {revision} is confirmed and stays"
        self._end_trial(actor, f"rev {revision} confirmed by {actor}", {"confirmed": revision})
        result = self._result(self._runtime.config)
        result.notes.append(told)
        return result

    def check_trial(self) -> None:
        """End the trial when its time is over or its guard is passed; costs little, ask often."""
        if self._trial is None:
            return
        verdict = self._trial.verdict(self._runtime.counters.preemptions)
        if verdict is None:
            return
        revision = self._runtime.revision
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
        about = {"revision": runtime.revision, "actor": actor, "changes": {}, "notes": []}
        runtime.events.add(runtime.step + 1, "config", summary, about | data)

    def _install(
        self, config: VTokenConfig, actor: str, story: _Story, terms: Terms | None = None
    ) -> PatchResult:
        runtime = self._runtime
        result = self._result(config)
        if not result.changes:
            return result
        result.notes = self.notes(config, terms)
        overtaken = self._overtaken()
        runtime.config = config
        runtime.revision += 1
        result.revision = runtime.revision
        data: dict[str, Any] = {
            "revision": runtime.revision,
            "actor": actor,
            "changes": result.changes,
            "notes": result.notes,
        }
        if overtaken is not None:
            data["overtaken"] = overtaken
        if terms is not None:
            self._begin_trial(terms, actor, result)
            data["trial"] = msgspec.to_builtins(result.trial)
        told = ", ".join(
            f"{name} {_short(old)} -> {_short(new)}" for name, (old, new) in result.changes.items()
        )
        told = f"{told} by {actor} (rev {runtime.revision})"
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
            preemptions=self._runtime.counters.preemptions,
            gaps=self._runtime.latency.watch() if guarded else None,
            clock=self._clock,
        )
        result.trial = self._trial.document

    def _leave_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None and trial.gaps is not None:
            self._runtime.latency.unwatch(trial.gaps)

    def _result(self, config: VTokenConfig) -> PatchResult:
        """`config` in place of what is desired now."""
        before, after = self._runtime.config.values(), config.values()
        return PatchResult(
            revision=self._runtime.revision,
            applied_at_step=self._runtime.step + 1,
            previous=before,
            effective=after,
            changes=diff(before, after),
        )


def _waiting_notes(old: VTokenConfig, new: VTokenConfig) -> list[str]:
    """Which of the values that change wait for something else, in words."""
    changed = diff(old.values(), new.values())
    notes = []
    gates = [name for name in ("theta_f", "low_watermark_blocks") if name in changed]
    if gates and new.reclamation != "auto":
        told = " and ".join(gates)
        notes.append(f"{told}: without effect while reclamation is {new.reclamation}")
    limits = [n for n in ("budget_tokens", "interval_tokens", "evict_during") if n in changed]
    if limits and not new.evicts:
        told = " and ".join(limits)
        notes.append(f"{told}: only for requests with a policy of their own, while policy is none")
    return notes


def _short(value: Any) -> str:
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return "none" if value is None else str(value)
