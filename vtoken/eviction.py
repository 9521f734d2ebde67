"""Eviction: which tokens die now, and which blocks that empties.

Knows the ledger; knows nothing of relocation or of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.ledger import Ledger
from vtoken.policies import View
from vtoken.requests import RequestState
from vtoken.sharing import keeps_dead_shared_blocks
from vtoken.step import NO_IDS
from vtoken.table import Ids, TokenTable


class Evictor:
    """Applies the configured policy to the tables of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def is_due(self, table: TokenTable, config: VTokenConfig | None = None) -> bool:
        """Whether `table` is to be cut down to its budget before its next tokens are computed."""
        rules = self._ledger.rules(table.request_id, config)
        if not rules.evicts or table.num_live <= rules.budget_tokens + rules.interval_tokens:
            return False
        to_compute = self._ledger.states[table.request_id].prefill_end - table.num_tokens
        if to_compute == 0:
            return True  # the end of the prompt belongs to both phases
        return rules.evict_during == "both" or (
            (rules.evict_during == "prefill") == (to_compute > 0)
        )

    def wants_scores(self, table: TokenTable) -> bool:
        """Whether the report of this step may be the newest one when `table` is next due."""
        lag = self._ledger.report_lag_steps
        if lag == 0:
            return self.is_due(table)
        rules = self._ledger.rules(table.request_id)
        return rules.evicts and table.num_live + lag > rules.budget_tokens + rules.interval_tokens

    def _are_stale(self, state: RequestState, table: TokenTable) -> bool:
        """Whether the scores are older than the steps in flight explain."""
        if state.scores is None:
            return True  # nothing has been probed yet: wait rather than guess
        lag = self._ledger.report_lag_steps
        if table.num_tokens - len(state.scores) <= lag:
            return False
        between_chunks = table.num_tokens < state.prefill_end
        return not between_chunks or state.scores_step < self._ledger.step - 1 - lag

    def pick_victims(self, table: TokenTable, config: VTokenConfig) -> Ids | None:
        """The ids that `config` would evict from `table` now; None when nothing is due."""
        if not self.is_due(table, config):
            return None
        config = self._ledger.rules(table.request_id, config)
        state = self._ledger.states[table.request_id]
        ids = table.live_ids()
        scores = None
        if "attention" in config.policy.needs:
            if self._are_stale(state, table):
                return None  # the next report is wanted: wait for it
            assert state.scores is not None
            # Tokens newer than the last report have not been seen: they count as heavy.
            known = np.full(table.num_tokens, np.inf, dtype=np.float32)
            known[: len(state.scores)] = state.scores[: table.num_tokens]
            scores = known[ids]
        view = View(
            token_ids=ids,
            num_tokens=table.num_tokens,
            num_prompt_tokens=state.num_prompt_tokens,
            budget_tokens=config.budget_tokens,
            seed=state.seed,
            scores=scores,
        )
        victims = config.policy.select_victims(view)
        if len(victims) != view.num_victims or victims[-1] == table.num_tokens - 1:
            raise InvariantViolation(
                "policy",
                f"{config.policy.name} returned {len(victims)} victims of {view.num_victims}, "
                f"the newest {victims[-1:]} of {table.num_tokens} tokens",
            )
        return victims

    def evict_due(self, ready: Iterable[str], freed: list[int]) -> bool:
        """Evict what is due among `ready`; blocks let go of join `freed`. Whether anything died."""
        ledger = self._ledger
        names: set[str] = set()
        num_requests = num_tokens = num_blocks = 0
        for request_id in ready:
            table = ledger.tables.get(request_id)
            if table is None:
                continue
            state = ledger.states[request_id]
            try:
                victims = self.pick_victims(table, ledger.config)
                if victims is None:
                    continue
                if not table.virtual:
                    state.readonly = frozenset(
                        block for block in table.blocks if not ledger.store.is_writable(block)
                    )
                table.evict(victims)
            except InvariantViolation as violation:
                ledger.violated(violation)
                continue
            pending = ledger.pending(table)
            pending.evicted = victims
            names.add(ledger.rules(request_id).policy.name)
            num_requests += 1
            num_tokens += len(victims)
            num_blocks += self._drop_dead_blocks(table, table.dead_blocks(victims), freed)
        if num_tokens == 0:
            return False
        name = ", ".join(sorted(names))
        ledger.counters.evicted_tokens += num_tokens
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
                f"{num_blocks} all-dead blocks returned",
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
