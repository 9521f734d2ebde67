"""Scoring, the scheduler's side: which signal the worker keeps for whom, and what came back.

Knows the ledger; knows neither how a signal is computed nor what a policy makes of it. Invariants:
1. numbers are used only for the signal and the layers they were asked for; a request whose policy
   reads another signal from now on starts anew, and nothing of it dies before the first report
2. numbers are used only while the request has been asked for them in every step since, so none is
   left over from an earlier eviction
3. where no policy reads a signal, the worker is asked nothing
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.ledger import Ledger
from vtoken.policies import Policy
from vtoken.requests import RequestState
from vtoken.signals import WARM_QUERIES, Floats, Signal
from vtoken.step import StepPlan, WorkerReport
from vtoken.table import Ids, TokenTable


class Scoring:
    """Asks the worker of one ledger for signals and holds its answers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._active = False  # some policy read a signal in the newest step

    def has_readers(self) -> bool:
        """Whether any policy in force reads a signal. If none does, what is held is dropped."""
        ledger = self._ledger
        if ledger.config.policy.reads is not None or any(
            own.policy is not None and own.policy.reads is not None
            for own in ledger.own_rules.values()
        ):
            self._active = True
        elif self._active:
            self._active = False
            for state in ledger.states.values():
                _restart(state, None, ())
        return self._active

    def ask(self, plan: StepPlan, grown: Iterable[tuple[str, int]]) -> None:
        """Write into `plan` what the worker keeps, probes and tells of the scheduled requests.

        `grown`: their ids, and how many tokens each had before this step. Where answers come late a
        request is asked that many tokens before it is due.
        """
        ledger = self._ledger
        probes_decode = ledger.step % ledger.config.probe_every_steps == 0
        layers = self.layers(ledger.config)
        probed, want = [], []
        for request_id, num_before in grown:
            table, state = ledger.tables[request_id], ledger.states[request_id]
            rules = ledger.rules(request_id)
            signal = rules.policy.reads
            if (state.signal, state.signal_layers) != (signal, layers):
                _restart(state, signal, layers)
            if signal is None:
                continue
            asks = self.soon_due(table, rules) or (
                _wants_profile(state, rules.policy) and table.num_tokens >= state.prefill_end
            )
            if asks and not state.asking:
                state.asked_from = ledger.step
            state.asking = asks
            if asks:
                want.append(request_id)
            if signal.source == "keys":
                if asks:
                    plan.signals[request_id] = signal
                continue
            plan.signals[request_id] = signal
            if probes_decode or num_before < state.prefill_end:
                probed.append(request_id)
        if not plan.signals:
            return
        plan.probing = True
        plan.signal_layers = layers
        plan.probe_layers = layers if probed else None
        plan.probed = frozenset(probed)
        plan.want_scores = tuple(want)

    def soon_due(self, table: TokenTable, rules: VTokenConfig) -> bool:
        """Whether this step's answer may be the newest one when `table` is next due."""
        soon = table.num_live + self._ledger.report_lag_steps
        return soon > rules.budget_tokens + rules.interval_tokens

    def layers(self, config: VTokenConfig) -> tuple[int, ...]:
        """The layers that `config` takes signals from."""
        return config.probe_layers or (self._ledger.geometry.num_layers // 2,)

    def receive(self, report: WorkerReport) -> None:
        """Take over the numbers of `report` that still answer what is asked."""
        for request_id, scores in report.scores.items():
            state = self._ledger.states.get(request_id)
            if state is not None and state.asking and report.step >= state.asked_from:
                state.scores, state.scores_step = scores, report.step

    def _are_stale(self, state: RequestState, num_tokens: int) -> bool:
        """Whether more is newer than the steps in flight and those between probes explain."""
        assert state.scores is not None
        lag = self._ledger.report_lag_steps
        if num_tokens - len(state.scores) < lag + self._ledger.config.probe_every_steps:
            return False
        between_chunks = num_tokens < state.prefill_end
        return not between_chunks or state.scores_step < self._ledger.step - 1 - lag

    def scores(
        self, state: RequestState, ids: Ids, signal: Signal, config: VTokenConfig
    ) -> Floats | None:
        """`signal` of the live `ids` [n], higher = keep; None while there is nothing to go by.

        Tokens newer than the last probe have no number yet: they count as heavy.
        """
        known = (state.signal, state.signal_layers) == (signal, self.layers(config))
        if not known or not state.asking or state.scores is None:
            return None
        if state.scores_step < state.asked_from or self._are_stale(state, int(ids[-1]) + 1):
            return None
        scores = np.full(len(ids), np.inf, dtype=np.float32)
        seen = int(np.searchsorted(ids, len(state.scores)))
        scores[:seen] = state.scores[ids[:seen]]
        return scores


def _restart(state: RequestState, signal: Signal | None, layers: tuple[int, ...]) -> None:
    state.signal, state.signal_layers = signal, layers
    state.asking, state.scores = False, None


def _wants_profile(state: RequestState, policy: Policy) -> bool:
    return policy.profiles and (state.profile is None or state.profile[0] != policy)


_FIRST_REPORT = {
    "attention_sum": f"{WARM_QUERIES} probed queries of it, or its whole prompt",
    "attention_last": "its next probed query",
    "key_norm": "its next step",
    "key_difference": "its next step",
}


def swap_notes(old: VTokenConfig, new: VTokenConfig, default_layer: int) -> list[str]:
    """What a change of policy, its parameters or the probed layers means for scores, in words."""
    before, after = old.policy.reads, new.policy.reads
    default = (default_layer,)
    same_layers = (old.probe_layers or default) == (new.probe_layers or default)
    if after is None or (old.policy == new.policy and same_layers):
        return []
    if before == after and same_layers:
        notes = [f"scores carry over: {old.policy.name} and {new.policy.name} read {after}"]
    else:
        was = "other layers" if before == after else before or "no scores"
        first = _FIRST_REPORT.get(
            after.kind,
            f"{min(after.window_queries, WARM_QUERIES)} probed queries of it, or its whole prompt",
        )
        notes = [
            f"scores start anew: {new.policy.name} reads {after}, until now it was {was}; "
            f"nothing of a running request is evicted before {first}"
        ]
    if new.policy.profiles and old.policy != new.policy:
        notes.append(f"{new.policy.name} profiles running requests on what it sees from now on")
    return notes
