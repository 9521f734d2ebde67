"""Scoring, the scheduler's side: which signals the worker keeps for whom, and what came back.

Knows the runtime's state; knows neither how a signal is computed nor what a policy makes of it. A
request's signals are what its policy reads and, where it differs, what the shadow policy reads,
with the layers and heads that the configuration, the calibration profile or else the model's depth
gives them. Invariants:
1. numbers are used only for the signal they were asked for, layers and heads included; a signal
   that nobody read until now starts anew, and nothing dies by it before the first report
2. numbers are used only while the request has been asked for them in every step since, so none is
   left over from an earlier eviction
3. where no policy reads a signal, the worker is asked nothing
4. what is asked for a policy that acts does not depend on the shadow
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import numpy as np

from vtoken.arrays import Bools, Floats, Ints
from vtoken.config.calibration import default_layer
from vtoken.config.values import VTokenConfig
from vtoken.policies import Policy
from vtoken.policies.signals import WARM_QUERIES, Signal
from vtoken.protocol.step import StepPlan, WorkerReport
from vtoken.runtime.requests import RequestState, SignalState
from vtoken.runtime.state import RuntimeState
from vtoken.wire import Probe

Resolve = Callable[[Signal, VTokenConfig], Signal]


class Scoring:
    """Asks the worker for signals and holds its answers."""

    def __init__(self, state: RuntimeState) -> None:
        self._state = state
        self.active = False  # some policy read a signal in the newest step that was committed
        self._resolved: dict[Signal, Signal] = {}  # under the probe settings
        self._resolved_for: Probe | None = None

    def has_readers(self) -> bool:
        """Whether any policy in force reads a signal. If none does, what is held is dropped."""
        state = self._state
        shadow = state.shadow.asked
        if (
            state.config.policy.reads is not None
            or (shadow is not None and shadow.reads is not None and state.may_evict)
            or any(policy.reads is not None for policy in state.own_policies.values())
        ):
            self.active = True
        elif self.active:
            self.active = False
            for request in state.requests.values():
                request.signals, request.signals_for = {}, None
        return self.active

    def ask(self, plan: StepPlan, names: Sequence[str], rows: Ints, num_before: Ints) -> None:
        """Write into `plan` what the worker keeps, probes and tells of the scheduled requests.

        `rows` [k], and how many tokens each had before this step. Where answers come late a request
        is asked that many tokens before it is due.
        """
        state = self._state
        probes_decode = state.step % state.config.probe_every_steps == 0
        shadow = state.shadow.asked
        probed, want = [], []
        own, rules = state.request_rules, state.config
        numbers = rows.tolist(), num_before.tolist(), self.soon_due(rows).tolist()
        for request_id, row, known_before, due in zip(names, *numbers, strict=True):
            request = state.requests[request_id]
            if own:
                rules = state.rules(request_id)
            known = request.signals_for
            if known is None or known[0] is not rules or known[1] is not shadow:
                self._follow(request, rules)
                request.signals_for = rules, shadow
            if not request.signals:
                continue
            attends = False
            kept: tuple[Signal, ...] = ()
            for asked in request.signals.values():
                signal, of_keys = asked.signal, asked.signal.of_keys
                asks = due or (
                    asked.reader.profiles
                    and state.tables.columns.num_tokens[row] >= request.prefill_end
                    and asked.reader not in request.profiles
                )
                if asks and not asked.asking:
                    asked.asked_from = state.step
                asked.asking = asks
                if asks:
                    want.append((request_id, signal))
                if asks or not of_keys:
                    kept += (signal,)
                attends |= not of_keys
            if kept:
                plan.signals[request_id] = kept
            if attends and (probes_decode or known_before < request.prefill_end):
                probed.append(request_id)
        if not plan.signals:
            return
        plan.probing = True
        plan.probed = frozenset(probed)
        plan.want_scores = tuple(want)

    def _follow(self, request: RequestState, rules: VTokenConfig) -> None:
        """From now on a request keeps what its policy reads, and the shadow, if it evicts at all.

        Signals that were kept go on, others start anew; one that both read is kept for the policy.
        """
        shadow = self._state.shadow.asked if rules.evicts else None
        before, request.signals = request.signals, {}
        for reader in (rules.policy,) if shadow is None else (rules.policy, shadow):
            if reader.reads is None:
                continue
            signal = self.resolve(reader.reads, rules)
            if signal in request.signals:
                continue
            asked = before.get(signal) or SignalState(signal, reader)
            asked.reader = reader
            request.signals[signal] = asked

    def soon_due(self, rows: Ints) -> Bools:
        """Of each of `rows` [k], whether this step's answer may be the newest when it is due."""
        soon = self._state.tables.columns.num_live[rows] + self._state.report_lag_steps
        due: Bools = soon > self._state.due.limit[rows]
        return due

    def resolve(self, signal: Signal, config: VTokenConfig) -> Signal:
        """`signal`, as a policy declares it, with the layers and heads that `config` takes it from.

        The same object for as long as the probe settings are the same.
        """
        if config.probe is not self._resolved_for:
            self._resolved, self._resolved_for = {}, config.probe
        found = self._resolved.get(signal)
        if found is None:
            found = self._resolved[signal] = self._resolve(signal, config.probe)
        return found

    def _resolve(self, signal: Signal, probe: Probe) -> Signal:
        """The settings come first, then the calibration profile, then a share of the depth.

        The profile's heads are those of its layers: they do not count where other layers are set.
        """
        state = self._state
        profile = None if state.calibration is None else state.calibration.of(signal.kind)
        layers, heads = [default_layer(state.geometry.num_layers, signal.kind)], probe.heads
        if probe.layers:
            layers = probe.layers
        elif profile is not None and profile.layers:
            layers, heads = profile.layers, probe.heads or profile.heads
        return replace(signal, layers=tuple(sorted({*layers})), heads=tuple(sorted({*heads})))

    def receive(self, report: WorkerReport) -> None:
        """Take over the numbers of `report` that still answer what is asked."""
        for (request_id, signal), scores in report.scores.items():
            request = self._state.requests.get(request_id)
            asked = None if request is None else request.signals.get(signal)
            if asked is not None and asked.asking and report.step >= asked.asked_from:
                asked.scores, asked.scores_step = scores, report.step

    def _are_stale(self, num_scored: int, scores_step: int, num_tokens: int, end: int) -> bool:
        """Whether more is newer than the steps in flight and those between probes explain.

        `end`: where the request's prompt ends.
        """
        lag = self._state.report_lag_steps
        if num_tokens - num_scored < lag + self._state.config.probe_every_steps:
            return False
        between_chunks = num_tokens < end
        return not between_chunks or scores_step < self._state.step - 1 - lag

    def told(self, request: RequestState, signal: Signal, config: VTokenConfig) -> Floats | None:
        """The newest answer about `signal`, by token id; None while there is nothing to go by."""
        asked = request.signals.get(self.resolve(signal, config))
        if asked is None:
            return None
        told, step = asked.scores, asked.scores_step
        if not asked.asking or told is None or step < asked.asked_from:
            return None
        num_tokens = self._state.tables[request.request_id].num_tokens
        if self._are_stale(len(told), step, num_tokens, request.prefill_end):
            return None
        return told

    def newest(self, request_id: str) -> Floats | None:
        """The newest answer about what the request's policy reads, by token id, however old."""
        rules = self._state.rules(request_id)
        if rules.policy.reads is None:
            return None
        signal = self.resolve(rules.policy.reads, rules)
        return self._state.requests[request_id].scores_of(signal)

    def scores(
        self, request: RequestState, ids: Ints, signal: Signal, config: VTokenConfig
    ) -> Floats | None:
        """`signal` of the live `ids` [n], higher = keep; None while there is nothing to go by.

        Tokens newer than the last probe have no number yet: they count as heavy.
        """
        told = self.told(request, signal, config)
        if told is None:
            return None
        scores = np.full(len(ids), np.inf, dtype=np.float32)
        seen = int(np.searchsorted(ids, len(told)))
        scores[:seen] = told[ids[:seen]]
        return scores


_FIRST_REPORT = {
    "attention_sum": f"{WARM_QUERIES} probed queries of it, or its whole prompt",
    "attention_last": "its next probed query",
    "key_norm": "its next step",
    "key_difference": "its next step",
}


def swap_notes(old: VTokenConfig, new: VTokenConfig, resolve: Resolve) -> list[str]:
    """What a change of policy, shadow, parameters or probe settings means for scores, in words."""

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
                f"{_first_report(after)}"
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
    return [f"shadow {shadow.name} is compared on a running request after {_first_report(reads)}"]


def _first_report(signal: Signal) -> str:
    """What a running request waits for when `signal` starts anew."""
    queries = min(signal.window_queries, WARM_QUERIES)
    return _FIRST_REPORT.get(signal.kind, f"{queries} probed queries of it, or its whole prompt")
