"""Runs policies on requests and validates every victim before it is evicted.

Evicts nothing itself. A policy may come from another package, so an exception or an invalid result
is an event and a counted violation and suspends the policy under these parameters: it evicts
nothing more, and everything else continues. (It cannot cause a wrong token, so even strict mode
does not stop the engine.)

A policy chooses for all its requests in one call; for a single request, and for what a change would
do, the batch has one. The shadow policy runs right before the eviction; its victims are only
compared.

Live tokens of forgotten spans are the first victims, oldest first; the policy chooses only those
that are missing then. Its view has no forgotten token, and the budget less the protected tokens, as
without any. The newest token and protected ones are not forgotten.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Floats, Ints, Ragged
from vtoken.base.errors import InvariantViolation, RefusedError
from vtoken.core.config.values import VTokenConfig
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.batch import TableBatch
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.held_request import ShadowComparison
from vtoken.core.runtime.requests import Requests
from vtoken.core.runtime.scoring import Scoring, scores_of
from vtoken.core.tables.token_table import TokenTable
from vtoken.policies import Policy, View
from vtoken.policies.base import checked
from vtoken.policies.shadow import ShadowTally
from vtoken.policies.tokenizer_info import Vocabulary

NO_SCORES: Floats = np.empty(0, dtype=np.float32)


class PolicyRunner:
    """Creates views of one runtime's requests and runs policies on them."""

    def __init__(
        self,
        requests: Requests,
        active: ActiveConfig,
        current: CurrentStep,
        shadow: ShadowTally,
        scoring: Scoring,
        vocabulary: Vocabulary | None,
    ) -> None:
        self._requests = requests
        self._active = active
        self._current = current
        self._shadow = shadow
        self._scoring = scoring
        self.vocabulary = vocabulary

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
            raise RefusedError(
                f"policy {policy.name} needs the request's words, but {why}",
                field=field,
                value=policy.name,
                bound="a policy that does not need token_ids",
            )

    def is_suspended(self, policy: Policy) -> bool:
        """Whether `policy` has failed and is no longer called."""
        return policy in self._active.suspended

    def can_choose(self, table: TokenTable) -> bool:
        """Whether the request's policy has all that it needs to choose victims now."""
        policy = self._requests.rules(table.request_id).policy
        if self.is_suspended(policy):
            return False
        return self._inputs(policy, self._active.config, table.request_id) is not None

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

    def victims(self, policy: Policy, rows: Ints) -> tuple[Ints, Ragged]:
        """Those of the due `rows` [k], requests of `policy`, for which it can choose now, and their
        victims [live - target]. No rows if the policy fails; it is suspended then.
        """
        nothing = rows[:0], Ragged.empty()
        if self.is_suspended(policy):
            return nothing
        try:
            return self._choose(policy, self._active.config, rows, self._requests.due.target[rows])
        except Exception as error:  # a policy of another package may raise anything
            self._suspend(policy, error)
            return nothing

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
        return self._scoring.current(request, policy.reads, self._requests.rules(name, config))

    def _tables_of(self, rows: Ints) -> list[TokenTable]:
        return [self._requests.tables.at(row) for row in rows.tolist()]

    def profiles(self) -> bool:
        """Whether any policy in force profiles its requests."""
        shadow = self._shadow.active_policy
        return (
            self._active.config.policy.profiles
            or (shadow is not None and shadow.profiles)
            or any(policy.profiles for policy in self._requests.own_policies.values())
        )

    def compare(self, rows: Ints, victims: Ragged) -> None:
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
                table.num_dead + len(died),
                died,
                _joined(first[i], chosen),
            )

    def take_profiles(self, rows: Ints) -> None:
        """Let policies that profile inspect the requests `rows` whose prompts have scores now."""
        if self.profiles():
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

    def refuse(self, policy: Policy, why: str) -> None:
        """Suspend `policy` because it named invalid victims, none of which died."""
        self._suspend(policy, InvariantViolation("policy", why))

    def _suspend(self, policy: Policy, error: Exception) -> None:
        self._active.suspend(policy)
        detail = f"policy {policy.name} failed and evicts nothing from now on: {error!r}"
        self._current.counters.invariants.violations += 1
        self._current.note("violation", detail, {"invariant": "policy", "detail": detail})


def _joined(first: Ints, others: Ints) -> Ints:
    """Both, ascending."""
    return np.sort(np.append(first, others)) if len(first) else others
