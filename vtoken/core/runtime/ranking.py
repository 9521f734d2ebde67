"""Ranking: which tokens die first, by the policies in force and the scores that they read.

Evicts nothing itself: it names the victims, and before that asks the worker for the signals that
policies rank by. A policy may come from another package, so an exception or an invalid result is an
event and a counted violation and suspends the policy under these parameters: it evicts nothing
more, and everything else continues. (It cannot cause a wrong token, so even strict mode does not
stop the engine.)

A policy chooses for all its requests in one call; for a single request, and for what a change would
do, the batch has one. The shadow policy runs right before the eviction; its victims are only
compared.

A copy in host memory does not change a token's rank: one that came back would otherwise give way
first, however much attention reads it.

Live tokens of forgotten spans are the first victims, oldest first; the policy chooses only those
that are missing then. Its view has no forgotten token, and the budget less the protected tokens, as
without any. The newest token and protected ones are not forgotten.

A request's signals are those that its policy and the shadow read, with layers and heads from the
configuration, else from the model's depth. Invariants:
1. scores are used only for the signal they were requested for, layers and heads included; a signal
   that no policy read before starts from zero, and evicts nothing before its first report
2. scores of attention are used only if they were requested in every step since, so none predates an
   eviction; a *reading* of keys holds until a token of its request dies or comes back, or until one
   that it lacks could be a victim, and no other is requested while it does
3. without a policy that reads a signal, the worker computes nothing
4. requests for the acting policy do not depend on the shadow
5. a token without a number dies after all that have one: those newer than the scores, and those
   that came back after the step that made them, are infinite
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vtoken.base.arrays import Bools, Floats, Ints, Ragged
from vtoken.base.errors import InvariantViolation, RefusedError, refused
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import NO_IDS, StepPlan, WorkerReport
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.batch import TableBatch
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.due import NEVER
from vtoken.core.runtime.held_request import HeldRequest, ShadowComparison, SignalState
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_table import TokenTable
from vtoken.policies import Policy, View
from vtoken.policies.base import checked
from vtoken.policies.shadow import ShadowTally
from vtoken.policies.signals import Signal
from vtoken.policies.tokenizer_info import Vocabulary
from vtoken.wire import Probe

NO_SCORES: Floats = np.empty(0, dtype=np.float32)


@dataclass(eq=False)
class Ranking:
    """Requests the signals of one runtime's policies, and runs the policies on their scores.

    `vocabulary`: the engine's tokens, if it has a tokenizer.
    """

    _shape: EngineShape
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _shadow: ShadowTally
    vocabulary: Vocabulary | None

    def __post_init__(self) -> None:
        self._reads = False  # some policy read a signal in the newest committed step
        self._resolved: dict[Signal, Signal] = {}  # for the probe settings
        self._resolved_for: Probe | None = None

    # ------------------------------------------------------------ policies

    def _in_force(self) -> list[Policy]:
        """The policies of the configuration and of requests, and the shadow that is compared."""
        shadow = self._shadow.active_policy
        policies = [self._active.config.policy, *self._requests.own_policies.values()]
        return policies if shadow is None or not self._requests.may_evict else [*policies, shadow]

    def require_all(self, config: VTokenConfig) -> None:
        """`require` for the policy and the shadow."""
        self.require(config.policy)
        if config.shadow is not None:
            self.require(config.shadow, "shadow.name")

    def require(self, policy: Policy, field: str = "policy.name") -> None:
        """Raise RefusedError if `policy` needs something that this engine does not have."""
        if "token_ids" not in policy.needs:
            return
        vocabulary = self.vocabulary
        why = "this engine has no tokenizer" if vocabulary is None else vocabulary.refusal()
        if why is not None:
            bound = "a policy that does not need token_ids"
            raise refused(field, policy.name, f"needs the request's words, but {why}", bound)

    def is_suspended(self, policy: Policy) -> bool:
        """Whether `policy` has failed and is no longer called."""
        return policy in self._active.suspended

    def refuse(self, policy: Policy, why: str) -> None:
        """Suspend `policy` because it named invalid victims, none of which died."""
        self._suspend(policy, InvariantViolation("policy", why))

    def _suspend(self, policy: Policy, error: Exception) -> None:
        self._active.suspended.append(policy)
        detail = f"policy {policy.name} failed and evicts nothing from now on: {error!r}"
        self._current.counters.invariants.violations += 1
        self._current.note("violation", detail, {"invariant": "policy", "detail": detail})

    # ------------------------------------------------------------ victims

    def choose(self, rows: Ints) -> tuple[Ints, Ragged]:
        """Those of the due `rows` [k] whose policy can choose now, and their victims, down to the
        target of each. A policy that fails is suspended.
        """
        asked = [
            self._victims(policy, own) for policy, own in self._requests.by_policy(rows).items()
        ]
        (chosen, victims), *others = asked
        for able, found in others:
            chosen, victims = np.append(chosen, able), victims.followed_by(found)
        self._compare(chosen, victims)
        return chosen, victims

    def _victims(self, policy: Policy, rows: Ints) -> tuple[Ints, Ragged]:
        """`choose` for the requests of one policy."""
        if not self.is_suspended(policy):
            try:
                targets = self._requests.due.target[rows]
                return self._choose(policy, self._active.config, rows, targets)
            except Exception as error:  # a policy of another package may raise anything
                self._suspend(policy, error)
        return rows[:0], Ragged.empty()

    def least(self, rows: Ints) -> Ints:
        """The fewest live tokens that each of the giving `rows` [k] can be cut down to now [k]: its
        floor, or what its forgotten tokens leave while its policy cannot choose.
        """
        least = self._requests.due.floor[rows]
        for i, table in enumerate(self._tables_of(rows)):
            if not self.can_choose(table):
                fails = self.is_suspended(self._requests.rules(table.request_id).policy)
                num_forgotten = 0 if fails else len(self._requests.forgotten_ids(table))
                least[i] = max(least[i], table.num_live - num_forgotten)
        return least

    def can_choose(self, table: TokenTable) -> bool:
        """Whether the request's policy has all that it needs to choose victims now."""
        policy = self._requests.rules(table.request_id).policy
        if self.is_suspended(policy):
            return False
        return self._inputs(policy, self._active.config, table.request_id) is not None

    def preview(self, table: TokenTable, config: VTokenConfig, target: int) -> Ints | None:
        """The victims of one request under a configuration that is not in force, if `target` tokens
        stay live; None if its policy cannot choose. Raises RefusedError if the policy fails.
        """
        policy = self._requests.rules(table.request_id, config).policy
        if self.is_suspended(policy):
            return None
        row, kept = np.array([table.row]), np.array([target])
        try:
            chosen, found = self._choose(policy, config, row, kept, check=True)
        except Exception as error:
            raise RefusedError(
                f"policy {policy.name} fails on {table.request_id}: {error!r}",
                field="policy.name",
                value=policy.name,
                bound="a policy that names as many live tokens as are due",
            ) from None
        return found.of(0) if len(chosen) else None

    def _choose(
        self,
        policy: Policy,
        config: VTokenConfig,
        rows: Ints,
        targets: Ints,
        *,
        check: bool = False,
    ) -> tuple[Ints, Ragged]:
        """Those of `rows` [k] for which `policy` can choose under `config`, and their victims if
        `targets` [k] tokens stay live. `check`: raise if the policy names invalid ones.
        """
        if not self._requests.forgotten or not self._requests.are_forgetting(rows).any():
            batch = self._batch(policy, config, rows, targets)
            return batch.rows, self._select(policy, batch, check=check)
        due = self._requests.tables.columns.num_live[rows] - targets
        first = [
            self._requests.forgotten_ids(table, config)[:most]
            for table, most in zip(self._tables_of(rows), due.tolist(), strict=True)
        ]
        asked = due > [len(ids) for ids in first]
        batch = self._batch(policy, config, rows[asked], targets[asked])
        found = self._select(policy, batch, check=check)
        others = {row: found.of(i) for i, row in enumerate(batch.rows.tolist())}
        others |= dict.fromkeys(rows[~asked].tolist(), NO_IDS)
        chosen = [i for i, row in enumerate(rows.tolist()) if row in others]
        victims = [_joined(first[i], others[int(rows[i])]) for i in chosen]
        return rows[chosen], Ragged.joined(victims)

    def _select(self, policy: Policy, batch: TableBatch, *, check: bool) -> Ragged:
        """The victims that `policy` names in each request of `batch`."""
        if len(batch.rows) == 0:
            return Ragged.empty()
        found = policy.select_many(batch)
        if found is None:
            return policy.select_each(batch)
        if len(found.starts) != len(batch.rows) + 1:
            raise InvariantViolation(
                "policy", f"victims of {len(found.starts) - 1} requests, not {len(batch.rows)}"
            )
        if found.values.dtype != np.int64:
            raise InvariantViolation("policy", f"victims of type {found.values.dtype}, not int64")
        if check:
            for i, view in enumerate(batch.views()):
                checked(view, view.num_victims, found.of(i))
        return found

    def _batch(self, policy: Policy, config: VTokenConfig, rows: Ints, targets: Ints) -> TableBatch:
        """Those of `rows` [k] for which `policy` has all that it needs under `config`.

        Protected and forgotten tokens are excluded; `targets` [k] tokens stay live.
        """
        tables = self._requests.tables
        scores = [NO_SCORES] * len(rows)
        if policy.reads is not None or policy.profiles or "token_ids" in policy.needs:
            inputs = [self._inputs(policy, config, tables.names[row]) for row in rows.tolist()]
            scores = [found for found in inputs if found is not None]
            if len(scores) < len(rows):
                ready = [found is not None for found in inputs]
                rows, targets = rows[ready], targets[ready]
        if config is self._active.config:
            excluded = self._requests.due.protected(rows)
        else:
            names = [tables.names[row] for row in rows.tolist()]
            excluded = Ragged.joined(
                [self._requests.protection(name, config).pairs for name in names]
            )
        kept = targets
        if self._requests.forgotten and (forgetting := self._requests.are_forgetting(rows)).any():
            parts = [excluded.of(i) for i in range(len(rows))]
            kept = targets.copy()
            for i in np.flatnonzero(forgetting).tolist():
                ids = self._requests.forgotten_ids(tables.at(rows[i]), config)
                pairs = np.append(parts[i].reshape(-1, 2), np.stack([ids, ids + 1], 1), axis=0)
                parts[i] = pairs[np.argsort(pairs[:, 0])].ravel()
                kept[i] += len(ids)
            excluded = Ragged.joined(parts)

        def view(i: int) -> View:
            return self._view(tables.at(rows[i]), config, policy, int(targets[i]), scores[i])

        return TableBatch(tables, rows, kept, scores, excluded, view)

    def _inputs(
        self, policy: Policy, config: VTokenConfig, name: str, *, profiled: bool = True
    ) -> Floats | None:
        """The scores, by token id, that `policy` needs of a request under `config`; empty if it
        reads none. None while these or other inputs are missing.
        """
        request = self._requests.held[name]
        if profiled and policy.profiles and policy not in request.profiles:
            return None  # its prompt is not complete
        if (
            "token_ids" in policy.needs
            and self.vocabulary is not None
            and self._requests.own_rules(name).prompt.is_embedded
        ):
            return None  # the words are unknown
        if policy.reads is None:
            return NO_SCORES
        return self.current(request, policy.reads, self._requests.rules(name, config))

    def _view(
        self, table: TokenTable, config: VTokenConfig, policy: Policy, budget: int, scores: Floats
    ) -> View:
        """The view of a request for `policy` under `config`: its live tokens that are neither
        protected nor forgotten, and `budget` minus the protected ones. `scores` by token id.
        """
        name = table.request_id
        request = self._requests.held[name]
        ids = table.live_ids()
        protection = self._requests.protection(name, config)
        if protection.num_tokens:
            protected = protection.covers(ids)
            ids, budget = ids[~protected], budget - int(np.count_nonzero(protected))
        if name in self._requests.forgotten:
            ids = np.setdiff1d(ids, self._requests.forgotten_ids(table, config), assume_unique=True)
        view = View(ids, table.num_tokens, request.num_prompt_tokens, budget, request.seed)
        view.profile = request.profiles.get(policy)
        if policy.reads is not None:
            view.scores = scores_of(ids, scores)
        if "token_ids" in policy.needs and self.vocabulary is not None:
            view.vocabulary_ids = words = self.vocabulary.words(name, ids)
            view.special = self.vocabulary.special(words)
            view.punctuation = self.vocabulary.punctuation(words)
        for array in (ids, view.scores, view.vocabulary_ids, view.special, view.punctuation):
            array.flags.writeable = False  # the victims are validated against them
        return view

    def _tables_of(self, rows: Ints) -> list[TokenTable]:
        return [self._requests.tables.at(row) for row in rows.tolist()]

    # ------------------------------------------------------------ shadow and profiles

    def _compare(self, rows: Ints, victims: Ragged) -> None:
        """Run the shadow, if there is one, on the requests `rows` [k] whose `victims` are about to
        die. Only those that a policy chose are compared.
        """
        policy = self._shadow.active_policy
        if policy is None:
            return
        first = [
            self._requests.forgotten_ids(table)[:count]
            for table, count in zip(self._tables_of(rows), victims.counts.tolist(), strict=True)
        ]
        place = {row: i for i, row in enumerate(rows.tolist()) if len(first[i]) < victims.counts[i]}
        try:
            asked = np.array([*place], dtype=np.int64)
            batch = self._batch(
                policy, self._active.config, asked, self._requests.due.target[asked]
            )
            able = batch.rows[batch.budget >= policy.min_budget_tokens()]
            if len(able) < len(batch.rows):
                batch = self._batch(
                    policy, self._active.config, able, self._requests.due.target[able]
                )
            found = self._select(policy, batch, check=True)
        except Exception as error:  # a policy of another package may raise anything
            self._shadow.fail(error)
            return
        self._shadow.count_without_scores(len(asked) - len(able))
        for number, row in enumerate(able.tolist()):
            i, chosen = place[row], found.of(number)
            died, table = victims.of(i), self._requests.tables.at(row)
            self._shadow.count(np.setdiff1d(died, first[i], assume_unique=True), chosen)
            self._requests.held[table.request_id].compared = ShadowComparison(
                policy,
                self._current.number,
                table.num_tokens,
                table.live_changes + len(died),
                died,
                _joined(first[i], chosen),
            )

    def take_profiles(self, rows: Ints) -> None:
        """Let policies that profile inspect the requests `rows` whose prompts have scores now."""
        if any(policy.profiles for policy in self._in_force()):
            for table in self._tables_of(rows):
                self._take_profile(table)

    def _take_profile(self, table: TokenTable) -> None:
        request, shadow = self._requests.held[table.request_id], self._shadow
        acting = self._requests.rules(table.request_id).policy
        policies = [acting] if shadow.active_policy is None else [acting, shadow.active_policy]
        if table.num_tokens < request.prefill_end:
            return
        for policy in policies:
            if not policy.profiles or policy in request.profiles or self.is_suspended(policy):
                continue
            try:
                self.require(policy)
                name = table.request_id
                scores = self._inputs(policy, self._active.config, name, profiled=False)
                if scores is not None:
                    budget = int(self._requests.due.target[table.row])
                    view = self._view(table, self._active.config, policy, budget, scores)
                    kept = {p: seen for p, seen in request.profiles.items() if p in policies}
                    request.profiles = {**kept, policy: policy.profile(view)}
            except Exception as error:
                if policy is acting:
                    self._suspend(policy, error)
                else:
                    shadow.fail(error)

    # ------------------------------------------------------------ signals

    def has_readers(self) -> bool:
        """Whether any policy in force reads a signal now. If none does, drops all scores."""
        reads = any(policy.reads is not None for policy in self._in_force())
        if reads and (self._current.is_short_soon or self._requests.evicts_by_length):
            self._reads = True
        elif self._reads:
            self._reads = False
            for request in self._requests.held.values():
                request.signals, request.signals_for = {}, None
        return self._reads

    @property
    def keeps_signals(self) -> bool:
        """Whether the worker keeps a signal of any request."""
        return self._reads and any(r.signals for r in self._requests.held.values())

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
        table, lag = self._requests.tables.at(row), self._shape.report_lag_steps
        num_tokens, live_changes = table.num_tokens, table.live_changes
        lacks = num_tokens - kept.asked_tokens + (lag + 1) * (1 + self._shape.max_drafts) - 1
        is_lost = kept.scores_step < kept.asked_step < self._current.number - lag
        cut_again = (
            self._requests.due.interval[row] < lag
        )  # maybe before a reading of after the cut arrives
        holds = live_changes == kept.live_changes and lacks <= kept.spared_tokens
        if holds and not is_lost and not cut_again:
            return False
        kept.ask(self._current.number, num_tokens, live_changes)
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
        """Layers come from the settings, else one from the depth of this kind of signal."""
        num_layers = self._shape.geometry.num_layers
        layers = probe.layers or [signal.definition.default_layer(num_layers)]
        return replace(signal, layers=tuple(sorted({*layers})), heads=tuple(sorted({*probe.heads})))

    # ------------------------------------------------------------ scores

    def receive(self, report: WorkerReport) -> None:
        """Store the scores of `report` that are still requested."""
        for (request_id, signal), scores in report.scores.items():
            request = self._requests.held.get(request_id)
            kept = None if request is None else request.signals.get(signal)
            if kept is not None and kept.requested and report.step >= kept.requested_since:
                kept.scores, kept.scores_step = scores, report.step

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
            if kept.holds(table.num_tokens, table.live_changes):
                return scores
            if step < self._current.number - 1 - self._shape.report_lag_steps:
                return None
        if self._are_stale(len(scores), step, table.num_tokens, request.prefill_end):
            return None
        return scores

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


def _joined(first: Ints, others: Ints) -> Ints:
    """Both, ascending."""
    return np.sort(np.append(first, others)) if len(first) else others
