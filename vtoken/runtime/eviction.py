"""Eviction: which tokens die now, and which blocks that empties.

Knows the runtime's state; knows nothing of relocation or of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vtoken.arrays import Ints
from vtoken.config.values import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.planning.sharing import keeps_dead_shared_blocks
from vtoken.protocol.step import NO_IDS
from vtoken.runtime.events import counted
from vtoken.runtime.policy_runner import PolicyRunner
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable
from vtoken.wire import MAX_TOKENS


class Evictor:
    """Applies the configured policy to the tables of one runtime."""

    def __init__(self, state: RuntimeState, policy_runner: PolicyRunner) -> None:
        self._state = state
        self._policy_runner = policy_runner

    def is_due(self, table: TokenTable, config: VTokenConfig | None = None) -> bool:
        """Whether `table` is to be cut down to its budget before its next tokens are computed."""
        rules = self._state.rules(table.request_id, config)
        if not rules.evicts or table.num_live <= rules.budget_tokens + rules.interval_tokens:
            return False
        request = self._state.requests[table.request_id]
        to_compute = request.prefill_end - table.num_tokens
        if to_compute == 0 or request.prompt_eviction_pending:
            return True  # the end of the prompt belongs to both phases
        return rules.evict_during == "both" or (
            (rules.evict_during == "prefill") == (to_compute > 0)
        )

    def pick_victims(self, table: TokenTable, config: VTokenConfig) -> Ints | None:
        """The ids that `config` evicts from `table` now; None when nothing is due."""
        if not self.is_due(table, config):
            return None
        return self._policy_runner.victims(table, self._state.rules(table.request_id, config))

    def would_evict(self, table: TokenTable, config: VTokenConfig) -> Ints | None:
        """`pick_victims` of what is not in force; raises RefusedError where its policy fails."""
        if not self.is_due(table, config):
            return None
        return self._policy_runner.would_name(table, self._state.rules(table.request_id, config))

    def num_waiting(self, table: TokenTable, config: VTokenConfig) -> int:
        """Tokens of `table` that `config` will evict once its policy has the scores it needs.

        Asked where `would_evict` has answered None.
        """
        rules = self._state.rules(table.request_id, config)
        if self._policy_runner.is_suspended(rules.policy) or not self.is_due(table, config):
            return 0
        return table.num_live - rules.budget_tokens

    def evict_due(self, ready: Iterable[str], freed: list[int]) -> bool:
        """Evict what is due among `ready`; blocks let go of join `freed`. Whether anything died."""
        state = self._state
        names: set[str] = set()
        num_requests = num_tokens = num_blocks = in_vain = 0
        own, config = state.own_rules, state.config
        shadow = state.shadow.asked
        shadow_profiles = shadow is not None and shadow.profiles
        profiles = config.policy.profiles or shadow_profiles
        limit = config.budget_tokens + config.interval_tokens if config.evicts else MAX_TOKENS
        known = state.tables.get
        for request_id in ready:
            table = known(request_id)
            if table is None or (
                table.num_live <= limit and not profiles and request_id not in own
            ):
                continue
            rules = state.rules(request_id)
            if rules.policy.profiles or shadow_profiles:
                self._policy_runner.take_profiles(table, rules)
            request = state.requests[request_id]
            try:
                victims = self.pick_victims(table, state.config)
                if victims is None:
                    if table.num_tokens == request.prefill_end:
                        request.prompt_eviction_pending = self.is_due(table)
                    continue
                request.prompt_eviction_pending = False
                self._policy_runner.compare(table, rules, victims)
                state.begin_evicting(table)
                table.evict(victims)
            except InvariantViolation as violation:
                state.violated(violation)
                continue
            pending = state.pending(table)
            pending.evicted = victims
            names.add(rules.policy.name)
            num_requests += 1
            num_tokens += len(victims)
            if request.last_moves is not None:
                in_vain += request.last_moves.num_recent(victims, state.step)
            num_blocks += self._drop_dead_blocks(table, table.dead_blocks(victims), freed)
        if num_tokens == 0:
            return False
        name = ", ".join(sorted(names))
        state.counters.evicted_tokens += num_tokens
        state.counters.moved_then_evicted_tokens += in_vain
        state.counters.reclaimed_blocks += num_blocks
        state.events.add(
            state.step,
            "eviction",
            f"{name} evicted {num_tokens} tokens of {num_requests} requests",
            {
                "requests": num_requests,
                "tokens": num_tokens,
                "policy": name,
            },
        )
        self._note_reclaimed(num_blocks)
        return True

    def let_go_of_kept(self, freed: list[int]) -> None:
        """Let go of all-dead blocks that were kept while shared, where nothing keeps them now."""
        num_blocks = 0
        for request_id, request in self._state.requests.items():
            if request.retained_dead_blocks:
                table = self._state.tables[request_id]
                dead = set(request.retained_dead_blocks.intersection(table.blocks))
                num_blocks += self._drop_dead_blocks(table, dead, freed)
        self._state.counters.reclaimed_blocks += num_blocks
        self._note_reclaimed(num_blocks)

    def _note_reclaimed(self, num_blocks: int) -> None:
        if num_blocks:
            self._state.events.add(
                self._state.step,
                "reclaimed",
                f"{counted(num_blocks, 'all-dead block')} returned",
                {"blocks": num_blocks, "reason": "all dead"},
            )

    def _drop_dead_blocks(self, table: TokenTable, dead: set[int], freed: list[int]) -> int:
        """Let go of `dead`, blocks without a live token; how many of them nobody holds any more.

        Under `skip` the request keeps those that others hold too.
        """
        if not dead:
            return 0
        state = self._state
        shared = {block for block in dead if state.store.is_shared(block)}
        request = state.requests[table.request_id]
        request.retained_dead_blocks -= dead
        if keeps_dead_shared_blocks(state.config):
            request.retained_dead_blocks |= shared
            dead = dead - shared
        else:
            state.counters.shared_released_blocks += len(shared)
        if not dead:
            return 0
        keep = [block for block in table.blocks if block not in dead]
        dropped = table.apply_moves(NO_IDS, NO_IDS, keep)
        state.rebound(table)
        freed.extend(dropped)
        return int(np.count_nonzero(state.tables.pool.holders[dropped] == 0))
