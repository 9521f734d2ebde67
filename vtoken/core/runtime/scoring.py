"""Scoring, the scheduler's side: the signals that the worker keeps per request, and their scores.

Independent of how signals are computed and used. A request's signals are those that its policy and
the shadow policy read, with layers and heads from the configuration, the calibration profile or the
model's depth, in this order. Invariants:
1. scores are used only for the signal they were requested for, layers and heads included; a signal
   that no policy read before starts from zero, and evicts nothing before its first report
2. scores of attention are used only if they were requested in every step since, so none predates an
   eviction; a *reading* of keys holds until a token of its request dies, or until one that it lacks
   could be a victim, and no other is requested while it does
3. without a policy that reads a signal, the worker computes nothing
4. requests for the acting policy do not depend on the shadow
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import numpy as np

from vtoken.base.arrays import Bools, Floats, Ints
from vtoken.core.config.calibration import CalibrationProfile, default_layer
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import StepPlan, WorkerReport
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.due import NEVER
from vtoken.core.runtime.held_request import HeldRequest, SignalState
from vtoken.core.runtime.requests import Requests
from vtoken.policies import Policy
from vtoken.policies.shadow import ShadowTally
from vtoken.policies.signals import Signal
from vtoken.wire import Probe

Resolve = Callable[[Signal, VTokenConfig], Signal]


class Scoring:
    """Requests signals from the worker and stores their scores."""

    def __init__(
        self,
        shape: EngineShape,
        requests: Requests,
        active: ActiveConfig,
        current: CurrentStep,
        shadow: ShadowTally,
        calibration: CalibrationProfile | None,
    ) -> None:
        self._shape = shape
        self._requests = requests
        self._active = active
        self._current = current
        self._shadow = shadow
        self.calibration = calibration
        self.active = False  # some policy read a signal in the newest committed step
        self._resolved: dict[Signal, Signal] = {}  # for the probe settings
        self._resolved_for: Probe | None = None

    def has_readers(self) -> bool:
        """Whether any policy in force reads a signal now. If none does, drops all scores."""
        shadow = self._shadow.active_policy
        reads = (
            self._active.config.policy.reads is not None
            or (shadow is not None and shadow.reads is not None and self._requests.may_evict)
            or any(policy.reads is not None for policy in self._requests.own_policies.values())
        )
        if reads and (self._current.is_short_soon or self._requests.evicts_by_length):
            self.active = True
        elif self.active:
            self.active = False
            for request in self._requests.held.values():
                request.signals, request.signals_for = {}, None
        return self.active

    @property
    def keeps_signals(self) -> bool:
        """Whether the worker keeps a signal of any request."""
        return self.active and any(r.signals for r in self._requests.held.values())

    def request_signals(
        self, plan: StepPlan, names: Sequence[str], rows: Ints, num_before: Ints, giving: Ints
    ) -> None:
        """Write into `plan` the signals that the worker keeps, probes and reports.

        `rows` [k] of the scheduled requests; `num_before` [k]: their tokens before this step;
        `giving`: those that are to give soon. With a report lag, a request's scores are requested
        that many tokens before it is due. Requests under `pressure` have no signals while no
        shortage is near.
        """
        probes_decode = self._current.number % self._active.config.probe.every_steps == 0
        shadow = self._shadow.active_policy
        probed, want = [], []
        own, rules = self._requests.announced, self._active.config
        due_soon = self.soon_due(rows)
        is_giving = np.zeros(len(self._requests.due.facts), dtype=np.bool_)
        is_giving[giving] = True
        due_soon |= is_giving[rows]
        keeps = self._current.is_short_soon | (self._requests.due.floor[rows] == NEVER)
        numbers = rows.tolist(), num_before.tolist(), due_soon.tolist(), keeps.tolist()
        for request_id, row, known_before, due, keep in zip(names, *numbers, strict=True):
            request = self._requests.held[request_id]
            if own:
                rules = self._requests.rules(request_id)
            known = request.signals_for
            if known is None or known[0] is not rules or known[1] is not shadow or known[2] != keep:
                self._set_signals(request, rules, keep=keep)
                request.signals_for = rules, shadow, keep
            if not request.signals:
                continue
            attends = False
            kept: tuple[Signal, ...] = ()
            for kept_signal in request.signals.values():
                signal, of_keys = kept_signal.signal, kept_signal.of_keys
                wanted = due or (
                    kept_signal.reader.profiles
                    and self._requests.tables.columns.num_tokens[row] >= request.prefill_end
                    and kept_signal.reader not in request.profiles
                )
                if of_keys:
                    wanted = wanted and self._needs_reading(kept_signal, row)
                if wanted and not kept_signal.requested:
                    kept_signal.requested_since = self._current.number
                kept_signal.requested = wanted or (of_keys and kept_signal.requested)
                if wanted:
                    want.append((request_id, signal))
                # The worker keeps what an earlier reading has seen only while it keeps the signal.
                if wanted or not of_keys or (kept_signal.requested and signal.anchor == "seen"):
                    kept += (signal,)
                attends |= not of_keys
            if kept:
                plan.signals[request_id] = kept
            if attends and (probes_decode or known_before < request.prefill_end):
                probed.append(request_id)
        plan.probed = frozenset(probed)
        plan.want_scores = tuple(want)

    def _needs_reading(self, kept: SignalState, row: int) -> bool:
        """Whether the newest reading of keys may not hold until one of the next step arrives; then
        notes that this step's is asked for.
        """
        columns = self._requests.tables.columns
        num_tokens, lag = int(columns.num_tokens[row]), self._shape.report_lag_steps
        num_dead = num_tokens - int(columns.num_live[row])
        lacks = num_tokens - kept.asked_tokens + (lag + 1) * (1 + self._shape.max_drafts) - 1
        is_lost = kept.scores_step < kept.asked_step < self._current.number - lag
        cut_again = (
            self._requests.due.interval[row] < lag
        )  # maybe before a reading of after the cut arrives
        holds = num_dead == kept.num_dead and lacks <= kept.spared_tokens
        if holds and not is_lost and not cut_again:
            return False
        kept.ask(self._current.number, num_tokens, num_dead)
        return True

    def _set_signals(self, request: HeldRequest, rules: VTokenConfig, *, keep: bool) -> None:
        """Set a request's signals to those of its policy and, if it evicts, of the shadow; to none
        unless `keep`.

        Existing signals continue, others start from zero; the policy is the reader of a common one.
        """
        shadow = self._shadow.active_policy if rules.evicts else None
        before, request.signals = request.signals, {}
        if not keep:
            return
        for reader in (rules.policy,) if shadow is None else (rules.policy, shadow):
            if reader.reads is None:
                continue
            signal = self.resolve(reader.reads, rules)
            if signal in request.signals:
                continue
            kept = before.get(signal) or SignalState(signal, reader)
            kept.reader = reader
            request.signals[signal] = kept

    def soon_due(self, rows: Ints) -> Bools:
        """Of each of `rows` [k], whether this step's scores may be the newest when it is due."""
        soon = self._requests.tables.columns.num_live[rows] + self._shape.report_lag_steps
        due: Bools = soon > self._requests.due.limit[rows]
        return due

    def resolve(self, signal: Signal, config: VTokenConfig) -> Signal:
        """`signal`, as declared by a policy, with its layers and heads under `config`.

        Returns the same object as long as the probe settings do not change.
        """
        if config.probe is not self._resolved_for:
            self._resolved, self._resolved_for = {}, config.probe
        found = self._resolved.get(signal)
        if found is None:
            found = self._resolved[signal] = self._resolve(signal, config.probe)
        return found

    def _resolve(self, signal: Signal, probe: Probe) -> Signal:
        """Layers come from the settings, else the calibration profile, else a share of the depth.

        The profile's heads belong to its layers and are ignored if other layers are set.
        """
        profile = None if self.calibration is None else self.calibration.of(signal.kind)
        layers, heads = [default_layer(self._shape.geometry.num_layers, signal.kind)], probe.heads
        if probe.layers:
            layers = probe.layers
        elif profile is not None and profile.layers:
            layers, heads = profile.layers, probe.heads or profile.heads
        return replace(signal, layers=tuple(sorted({*layers})), heads=tuple(sorted({*heads})))

    def receive(self, report: WorkerReport) -> None:
        """Store the scores of `report` that are still requested."""
        for (request_id, signal), scores in report.scores.items():
            request = self._requests.held.get(request_id)
            kept = None if request is None else request.signals.get(signal)
            if kept is not None and kept.requested and report.step >= kept.requested_since:
                kept.scores, kept.scores_step = scores, report.step

    def _are_stale(self, num_scored: int, scores_step: int, num_tokens: int, end: int) -> bool:
        """Whether more tokens lack scores than steps in flight and between probes explain.

        `end`: the end of the request's prompt.
        """
        lag = self._shape.report_lag_steps
        steps = lag + self._active.config.probe.every_steps - 1
        if num_tokens - num_scored <= steps * (1 + self._shape.max_drafts):
            return False
        between_chunks = num_tokens < end
        return not between_chunks or scores_step < self._current.number - 1 - lag

    def current(self, request: HeldRequest, signal: Signal, config: VTokenConfig) -> Floats | None:
        """The newest scores of `signal`, by token id; None if there are none or they are stale."""
        kept = request.signals.get(self.resolve(signal, config))
        if kept is None:
            return None
        scores, step = kept.scores, kept.scores_step
        if not kept.requested or scores is None or step < kept.requested_since:
            return None
        table = self._requests.tables[request.request_id]
        if kept.of_keys:
            if kept.holds(table.num_tokens, table.num_dead):
                return scores
            if step < self._current.number - 1 - self._shape.report_lag_steps:
                return None
        if self._are_stale(len(scores), step, table.num_tokens, request.prefill_end):
            return None
        return scores

    def newest(self, request_id: str) -> Floats | None:
        """The newest scores of the signal that the request's policy reads, even if stale."""
        rules = self._requests.rules(request_id)
        if rules.policy.reads is None:
            return None
        signal = self.resolve(rules.policy.reads, rules)
        return self._requests.held[request_id].scores_of(signal)


def scores_of(ids: Ints, by_id: Floats) -> Floats:
    """The scores [n] of the live `ids` [n]. Tokens newer than the last probe have none yet and get
    infinity.
    """
    scores = np.full(len(ids), np.inf, dtype=np.float32)
    scored = int(np.searchsorted(ids, len(by_id)))
    scores[:scored] = by_id[ids[:scored]]
    return scores


def swap_notes(old: VTokenConfig, new: VTokenConfig, resolve: Resolve) -> list[str]:
    """Notes on what a change of policy, shadow, parameters or probe settings means for scores."""

    def read(policy: Policy | None, config: VTokenConfig) -> Signal | None:
        reads = None if policy is None else policy.reads
        return None if reads is None else resolve(reads, config)

    held = {read(old.policy, old): old.policy.name}
    if old.shadow is not None and old.evicts:
        held.setdefault(read(old.shadow, old), f"shadow {old.shadow.name}")
    notes = []
    before, after = read(old.policy, old), read(new.policy, new)
    if after is not None and (old.policy != new.policy or before != after):
        if after in held:
            notes.append(f"scores carry over: {held[after]} and {new.policy.name} read {after}")
        else:
            notes.append(
                f"scores start anew: {new.policy.name} reads {after}, until now it was "
                f"{before or 'no scores'}; nothing of a running request is evicted before "
                f"{after.first_report}"
            )
        known = (old.policy, old.shadow)
        if new.policy.profiles and new.policy not in known:
            notes.append(f"{new.policy.name} profiles running requests on what it sees from now on")
    return notes + _shadow_notes(old, new, read(new.shadow, new), held)


def _shadow_notes(
    old: VTokenConfig, new: VTokenConfig, reads: Signal | None, held: Container[Signal | None]
) -> list[str]:
    shadow = new.shadow
    if shadow is None or (shadow == old.shadow and new.evicts == old.evicts):
        return []
    if not new.evicts:
        return [f"policy none evicts nothing that shadow {shadow.name} could be compared with"]
    if reads is None or reads in held:
        return []
    return [f"shadow {shadow.name} is compared on a running request after {reads.first_report}"]
