"""Runs policies on requests and validates every victim before it is evicted.

Evicts nothing itself. A policy may come from another package, so an exception or an invalid result
is an event and a counted violation and suspends the policy under these parameters: it evicts
nothing more, and everything else continues. (It cannot cause a wrong token, so even strict mode
does not stop the engine.)

The shadow policy runs on its own view right before the eviction; its victims are only compared.

Live tokens of forgotten spans are the first victims, oldest first; the policy chooses only those
that are missing then. Its view has no forgotten token, and the budget less the protected tokens, as
without any. The newest token and protected ones are not forgotten.
"""

from __future__ import annotations

import numpy as np

from vtoken.arrays import Floats, Ints, Ragged
from vtoken.config.values import VTokenConfig
from vtoken.errors import InvariantViolation, RefusedError
from vtoken.policies import Policy, View
from vtoken.policies.base import supports_batches
from vtoken.policies.tokenizer_info import Vocabulary
from vtoken.runtime.batch import TableBatch
from vtoken.runtime.requests import ShadowComparison
from vtoken.runtime.scoring import Scoring
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable


class PolicyRunner:
    """Creates views of one runtime's requests and runs policies on them."""

    def __init__(
        self, state: RuntimeState, scoring: Scoring, vocabulary: Vocabulary | None
    ) -> None:
        self._state = state
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
        return policy in self._state.suspended

    def can_choose(self, table: TokenTable) -> bool:
        """Whether the request's policy has all that it needs to choose victims now."""
        state, name = self._state, table.request_id
        rules, request = state.rules(name), state.requests[name]
        policy = rules.policy
        if self.is_suspended(policy) or (policy.profiles and policy not in request.profiles):
            return False
        if policy.reads is None:
            return True
        return self._scoring.current(request, policy.reads, rules) is not None

    def most_victims(self, table: TokenTable) -> int:
        """The most victims that can be named now: without scores, the forgotten tokens."""
        if self.can_choose(table):
            return table.num_live
        if self.is_suspended(self._state.rules(table.request_id).policy):
            return 0
        return len(self._state.forgotten_ids(table))

    def victims(self, table: TokenTable) -> Ints | None:
        """The ids [live - budget] to evict from `table` now; None if the policy cannot choose."""
        config = self._state.config
        try:
            return self._victims(table, config, self._target(table))
        except Exception as error:  # a policy of another package may raise anything
            self._suspend(self._state.rules(table.request_id, config).policy, error)
            return None

    def supports_batches(self, policy: Policy) -> bool:
        """Whether `policy` may run on many requests at once, without a shadow to compare."""
        return (
            supports_batches(type(policy))
            and not policy.profiles
            and not self.is_suspended(policy)
            and self._state.shadow.active_policy is None
        )

    def victims_together(self, policy: Policy, rows: Ints) -> tuple[Ints, Ragged] | None:
        """The due `rows` [k] for which `policy` can choose, and their victims; None if the policy
        must run request by request.
        """
        state, due = self._state, self._state.due
        scores: list[Floats] = []
        if policy.reads is not None:
            requests = [state.requests[state.tables.names[row]] for row in rows.tolist()]
            known = [self._scoring.current(one, policy.reads, state.config) for one in requests]
            waits = np.array([one is None for one in known], dtype=np.bool_)
            late = rows[waits]
            due.waits[late] |= state.tables.columns.num_tokens[late] == due.prefill_end[late]
            rows, scores = rows[~waits], [one for one in known if one is not None]
        batch = TableBatch(state.tables, rows, due.target[rows], scores, due.protected(rows))
        try:
            found = policy.select_many(batch)
        except Exception as error:  # a policy of another package may raise anything
            self._suspend(policy, error)
            return rows[:0], Ragged.empty()
        return None if found is None else (rows, found)

    def preview(self, table: TokenTable, config: VTokenConfig, target: int) -> Ints | None:
        """`victims` under a configuration that is not in force, if `target` tokens stay live;
        raises RefusedError if the policy fails.
        """
        try:
            return self._victims(table, config, target)
        except Exception as error:
            name = self._state.rules(table.request_id, config).policy.name
            raise RefusedError(
                f"policy {name} fails on {table.request_id}: {error!r}",
                field="policy.name",
                value=name,
                bound="a policy that names as many live tokens as are due",
            ) from None

    def _target(self, table: TokenTable) -> int:
        """The live tokens that the request is cut down to."""
        return int(self._state.due.target[table.row])

    def _victims(self, table: TokenTable, config: VTokenConfig, target: int) -> Ints | None:
        policy = self._state.rules(table.request_id, config).policy
        if self.is_suspended(policy):
            return None
        first = self._state.forgotten_ids(table, config)[: table.num_live - target]
        if len(first) and len(first) == table.num_live - target:
            return first
        view = self._view(table, config, policy, target)
        return None if view is None else _joined(first, _checked(policy, view))

    def profiles(self) -> bool:
        """Whether any policy in force profiles its requests."""
        state = self._state
        shadow = state.shadow.active_policy
        return (
            state.config.policy.profiles
            or (shadow is not None and shadow.profiles)
            or any(policy.profiles for policy in state.own_policies.values())
        )

    def compare(self, table: TokenTable, victims: Ints) -> None:
        """Run the shadow, if there is one, on a request whose `victims` are about to die.

        Only those that a policy chose are compared.
        """
        shadow = self._state.shadow
        policy = shadow.active_policy
        if policy is None:
            return
        first = self._state.forgotten_ids(table)[: len(victims)]
        if len(first) == len(victims):
            return
        try:
            view = self._view(table, self._state.config, policy, self._target(table))
            if view is None or view.budget_tokens < policy.min_budget_tokens():
                shadow.count_without_scores()
            else:
                chosen = _checked(policy, view)
                shadow.count(np.setdiff1d(victims, first, assume_unique=True), chosen)
                self._state.requests[table.request_id].compared = ShadowComparison(
                    policy,
                    self._state.step,
                    table.num_tokens,
                    table.num_dead + len(victims),
                    victims,
                    _joined(first, chosen),
                )
        except Exception as error:
            shadow.fail(error)

    def take_profiles(self, table: TokenTable) -> None:
        """Let policies that profile inspect the request once its prompt has scores."""
        state = self._state
        request, shadow = state.requests[table.request_id], state.shadow
        acting = state.rules(table.request_id).policy
        policies = [acting] if shadow.active_policy is None else [acting, shadow.active_policy]
        if table.num_tokens < request.prefill_end:
            return
        for policy in policies:
            if not policy.profiles or policy in request.profiles or self.is_suspended(policy):
                continue
            try:
                self.require(policy)
                budget = self._target(table)
                view = self._view(table, state.config, policy, budget, profiled=False)
                if view is not None:
                    kept = {p: seen for p, seen in request.profiles.items() if p in policies}
                    request.profiles = {**kept, policy: policy.profile(view)}
            except Exception as error:
                if policy is acting:
                    self._suspend(policy, error)
                else:
                    shadow.fail(error)

    def _view(
        self,
        table: TokenTable,
        config: VTokenConfig,
        policy: Policy,
        budget: int,
        *,
        profiled: bool = True,
    ) -> View | None:
        """The view of a request for `policy` under `config`: its live tokens that are neither
        protected nor forgotten, and `budget` minus the protected ones. None while required inputs
        are missing.
        """
        state, name = self._state, table.request_id
        request, rules = state.requests[name], state.rules(name, config)
        ids = table.live_ids()
        protection = state.protection(name, config)
        if protection.num_tokens:
            protected = protection.covers(ids)
            ids, budget = ids[~protected], budget - int(np.count_nonzero(protected))
        if name in state.forgotten:
            ids = np.setdiff1d(ids, self._state.forgotten_ids(table, config), assume_unique=True)
        view = View(ids, table.num_tokens, request.num_prompt_tokens, budget, request.seed)
        if policy.profiles and profiled:
            if policy not in request.profiles:
                return None  # its prompt is not complete
            view.profile = request.profiles[policy]
        signal = policy.reads
        if signal is not None:
            scores = self._scoring.scores(request, ids, signal, rules)
            if scores is None:
                return None
            view.scores = scores
        if "token_ids" in policy.needs and self.vocabulary is not None:
            if state.is_embedded(name):
                return None  # the words are unknown
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
        self._state.suspend(policy)
        detail = f"policy {policy.name} failed and evicts nothing from now on: {error!r}"
        self._state.counters.violations += 1
        self._state.events.add(
            self._state.step, "violation", detail, {"invariant": "policy", "detail": detail}
        )


def _joined(first: Ints, others: Ints) -> Ints:
    """Both, ascending."""
    return np.sort(np.append(first, others)) if len(first) else others


def _checked(policy: Policy, view: View) -> Ints:
    """The victims of `policy`, ascending; raises InvariantViolation if they are invalid.

    The expected number is read before the policy runs, because the policy may modify the view.
    """
    live, num_victims = view.token_ids, view.num_victims
    victims = np.asarray(policy.select_victims(view))
    found = np.unique(victims)
    if len(found) != victims.size or len(found) != num_victims:
        raise InvariantViolation(
            "policy", f"{len(found)} different victims of {victims.size}, not {num_victims}"
        )
    if found.dtype.kind not in "iu":
        raise InvariantViolation("policy", f"victims of type {found.dtype} are not token ids")
    found = found.astype(np.int64)
    unknown_ids = found[~np.isin(found, live, assume_unique=True)]
    if len(unknown_ids):
        raise InvariantViolation(
            "policy", f"victims {unknown_ids[:5].tolist()} are not live, or protected"
        )
    if found[-1] == live[-1]:
        raise InvariantViolation("policy", f"the newest token {found[-1]} is a victim")
    return found
