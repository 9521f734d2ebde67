"""Eviction: which tokens die now, and which blocks that empties.

Knows the ledger; knows nothing of relocation or of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vtoken.config.values import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.planning.sharing import keeps_dead_shared_blocks
from vtoken.protocol.step import NO_IDS
from vtoken.runtime.events import counted
from vtoken.runtime.policy_runner import Judge
from vtoken.runtime.state import Ledger
from vtoken.tables.token_table import Ids, TokenTable
from vtoken.wire import MAX_TOKENS


class Evictor:
    """Applies the configured policy to the tables of one ledger."""

    def __init__(self, ledger: Ledger, judge: Judge) -> None:
        self._ledger = ledger
        self._judge = judge

    def is_due(self, table: TokenTable, config: VTokenConfig | None = None) -> bool:
        """Whether `table` is to be cut down to its budget before its next tokens are computed."""
        rules = self._ledger.rules(table.request_id, config)
        if not rules.evicts or table.num_live <= rules.budget_tokens + rules.interval_tokens:
            return False
        state = self._ledger.states[table.request_id]
        to_compute = state.prefill_end - table.num_tokens
        if to_compute == 0 or state.owes_prompt:
            return True  # the end of the prompt belongs to both phases
        return rules.evict_during == "both" or (
            (rules.evict_during == "prefill") == (to_compute > 0)
        )

    def pick_victims(self, table: TokenTable, config: VTokenConfig) -> Ids | None:
        """The ids that `config` evicts from `table` now; None when nothing is due."""
        if not self.is_due(table, config):
            return None
        return self._judge.victims(table, self._ledger.rules(table.request_id, config))

    def would_evict(self, table: TokenTable, config: VTokenConfig) -> Ids | None:
        """`pick_victims` of what is not in force; raises RefusedError where its policy fails."""
        if not self.is_due(table, config):
            return None
        return self._judge.would_name(table, self._ledger.rules(table.request_id, config))

    def num_waiting(self, table: TokenTable, config: VTokenConfig) -> int:
        """Tokens of `table` that `config` will evict once its policy has the scores it needs.

        Asked where `would_evict` has answered None.
        """
        rules = self._ledger.rules(table.request_id, config)
        if self._judge.is_suspended(rules.policy) or not self.is_due(table, config):
            return 0
        return table.num_live - rules.budget_tokens

    def evict_due(self, ready: Iterable[str], freed: list[int]) -> bool:
        """Evict what is due among `ready`; blocks let go of join `freed`. Whether anything died."""
        ledger = self._ledger
        names: set[str] = set()
        num_requests = num_tokens = num_blocks = in_vain = 0
        own, config = ledger.own_rules, ledger.config
        shadow = ledger.shadow.asked
        shadow_profiles = shadow is not None and shadow.profiles
        profiles = config.policy.profiles or shadow_profiles
        limit = config.budget_tokens + config.interval_tokens if config.evicts else MAX_TOKENS
        known = ledger.tables.get
        for request_id in ready:
            table = known(request_id)
            if table is None or (
                table.num_live <= limit and not profiles and request_id not in own
            ):
                continue
            rules = ledger.rules(request_id)
            if rules.policy.profiles or shadow_profiles:
                self._judge.take_profiles(table, rules)
            state = ledger.states[request_id]
            try:
                victims = self.pick_victims(table, ledger.config)
                if victims is None:
                    if table.num_tokens == state.prefill_end:
                        state.owes_prompt = self.is_due(table)
                    continue
                state.owes_prompt = False
                if not table.virtual:
                    state.readonly = frozenset(
                        block for block in table.blocks if not ledger.store.is_writable(block)
                    )
                self._judge.compare(table, rules, victims)
                ledger.all_positional = False
                table.evict(victims)
            except InvariantViolation as violation:
                ledger.violated(violation)
                continue
            pending = ledger.pending(table)
            pending.evicted = victims
            names.add(rules.policy.name)
            num_requests += 1
            num_tokens += len(victims)
            if state.last_moves is not None:
                in_vain += state.last_moves.num_recent(victims, ledger.step)
            num_blocks += self._drop_dead_blocks(table, table.dead_blocks(victims), freed)
        if num_tokens == 0:
            return False
        name = ", ".join(sorted(names))
        ledger.counters.evicted_tokens += num_tokens
        ledger.counters.moved_then_evicted_tokens += in_vain
        ledger.counters.reclaimed_blocks += num_blocks
        ledger.events.add(
            ledger.step,
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
        for request_id, state in self._ledger.states.items():
            if state.kept_dead:
                table = self._ledger.tables[request_id]
                dead = set(state.kept_dead.intersection(table.blocks))
                num_blocks += self._drop_dead_blocks(table, dead, freed)
        self._ledger.counters.reclaimed_blocks += num_blocks
        self._note_reclaimed(num_blocks)

    def _note_reclaimed(self, num_blocks: int) -> None:
        if num_blocks:
            self._ledger.events.add(
                self._ledger.step,
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
        ledger = self._ledger
        shared = {block for block in dead if ledger.store.is_shared(block)}
        state = ledger.states[table.request_id]
        state.kept_dead -= dead
        if keeps_dead_shared_blocks(ledger.config):
            state.kept_dead |= shared
            dead = dead - shared
        else:
            ledger.counters.shared_released_blocks += len(shared)
        if not dead:
            return 0
        keep = [block for block in table.blocks if block not in dead]
        dropped = table.apply_moves(NO_IDS, NO_IDS, keep)
        ledger.rebound(table)
        freed.extend(dropped)
        return int(np.count_nonzero(ledger.tables.pool.holders[dropped] == 0))
