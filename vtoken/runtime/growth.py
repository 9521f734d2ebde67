"""Growth: the tokens that the engine has scheduled enter their tables, and where the next ones go.

Knows the ledger; knows neither policies nor relocation. Nothing is done for a request that does not
grow, and a decoded token of a positional request costs counting alone.

Invariants:
1. appended tokens go behind the last one, in order; a single one may go into a hole instead
2. tokens of a request that has evicted something are written to private, unhashed blocks only (I4)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from vtoken.errors import InvariantViolation
from vtoken.protocol.step import RequestStep, StepPlan
from vtoken.runtime.requests import RequestState
from vtoken.runtime.state import Ledger
from vtoken.tables.token_table import TokenTable


class GrownRequest(msgspec.Struct, gc=False):
    """A scheduled request after allocation: its whole block table and its tokens so far."""

    request_id: str
    block_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    seed: int
    num_prefill_tokens: int = 0  # when first scheduled: tokens to compute before it decodes


class Grower:
    """Places the new tokens of one ledger's requests."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tables = ledger.tables  # who asks anything here has caught up with the engine
        self._with_hole: list[RequestState] = []  # in the step being planned

    def pick_holes(self) -> bool:
        """Choose the hole that each request's next single token is written to.

        Whether a request with holes holds more blocks than its live tokens and the next one need.
        """
        ledger = self._ledger
        recycling = ledger.config.recycle and ledger.config.reclamation != "off"
        size = ledger.geometry.block_size
        spare = False
        for state in self._with_hole:
            state.hole = None
        self._with_hole.clear()
        for table in self._tables:
            if table.extent == table.num_live:
                continue
            if recycling:
                state = ledger.states[table.request_id]
                state.hole = table.first_hole(state.readonly)
                self._with_hole.append(state)
            spare = spare or len(table.blocks) > table.num_live // size + 1
        return spare

    def required_extent(self, request_id: str, num_new: int) -> int | None:
        """Places that must exist for `num_new` more tokens; None when the layout is positional."""
        table = self._tables.get(request_id)
        if table is None or not table.virtual:
            return None
        state = self._ledger.states[request_id]
        if num_new == 1 and state.hole is not None:
            return table.extent
        if not state.readonly:
            return table.extent + num_new
        return table.append_start(state.readonly) + num_new

    def enter(self, grown: Iterable[GrownRequest]) -> None:
        """Register the new tokens of all scheduled requests."""
        ledger, tables = self._ledger, self._tables
        known, pending, is_writable = tables.get, ledger.pending, ledger.store.is_writable
        slots: list[int] = []  # of single new tokens; the pool is told of them all at once
        parts: list[tuple[RequestStep, int]] = []  # of virtual requests, with the index in `slots`
        for request in grown:
            table = known(request.request_id)
            if table is None:
                self._admit(request)
                continue
            num_new = request.num_tokens - table.num_tokens
            if num_new != 1:
                self._enter_several(table, request)
                continue
            part = start = None
            if table.virtual:
                part, start = pending(table), self._next_place(table)
            if len(request.block_ids) != len(table.blocks):
                tables.sync_blocks(table, request.block_ids)
            slot = table.append(start)
            if part is not None:
                if not is_writable(slot // table.block_size):
                    self._not_private(slot // table.block_size)
                part.num_live, part.dense = table.num_live, table.extent == table.num_live
                parts.append((part, len(slots)))
            slots.append(slot)
        if not slots:
            return
        batch = np.array(slots, dtype=np.int64)
        if len(set(slots)) == len(slots):
            tables.pool.add(batch)
        else:  # two requests write one slot: counted as it is, for `check` to find
            for i in range(len(batch)):
                tables.pool.add(batch[i : i + 1])
        for part, i in parts:
            part.new_slots = batch[i : i + 1]

    def _admit(self, request: GrownRequest) -> None:
        ledger = self._ledger
        request_id = request.request_id
        ledger.states[request_id] = RequestState(
            request_id,
            request.num_prompt_tokens,
            max(request.num_prompt_tokens, request.num_prefill_tokens),
            request.seed,
            ledger.step,
        )
        self._tables.sync_new_tokens(request_id, request.block_ids, request.num_tokens)

    def _next_place(self, table: TokenTable) -> int:
        """Where the next token of a request that has evicted something goes.

        Asked before the blocks of this step join: a block that left and came back is private now.
        """
        state = self._ledger.states[table.request_id]
        if state.hole is not None:
            state.recycled_slots += 1
            self._ledger.counters.recycled_slots += 1
            return state.hole
        return table.append_start(state.readonly) if state.readonly else table.extent

    def _enter_several(self, table: TokenTable, request: GrownRequest) -> None:
        ledger = self._ledger
        start = None
        part = None
        if table.virtual:
            start = table.append_start(ledger.states[table.request_id].readonly)
            part = ledger.pending(table)
        slots = self._tables.sync_new_tokens(
            table.request_id, request.block_ids, request.num_tokens, start
        )
        if part is not None:
            part.new_slots = slots
            for block in np.unique(slots // table.block_size).tolist():
                if not ledger.store.is_writable(block):
                    self._not_private(block)

    def _not_private(self, block: int) -> None:
        self._ledger.violated(InvariantViolation("I4", f"block {block} is written, not private"))

    def lend_scratch(self, plan: StepPlan) -> None:
        """Free blocks for packing the holey requests that decode one token in this step."""
        ledger = self._ledger
        size = ledger.geometry.block_size
        packed = {
            request_id: self._tables[request_id].full_and_loose()
            for request_id, part in plan.requests.items()
            if not part.dense and len(part.new_slots) == 1
        }
        if not packed:
            return
        needs = {request_id: -(-len(loose) // size) for request_id, (_, loose) in packed.items()}
        lent = ledger.store.lend(sum(needs.values()))
        first = 0
        for request_id, need in needs.items():
            if first + need <= len(lent):
                part = plan.requests[request_id]
                part.full_blocks, part.loose_slots = packed[request_id]
                part.scratch = lent[first : first + need]
                first += need
