"""Growth: the tokens that the engine has scheduled enter their tables, and where the next ones go.

Knows the runtime's state; knows neither policies nor relocation. Nothing is done for a request that
does not grow, and a decoded token of a positional request costs counting alone.

Invariants:
1. appended tokens go behind the last one, in order; a single one may go into a hole instead
2. tokens of a request that has evicted something are written to private, unhashed blocks only (I4)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from vtoken.errors import InvariantViolation
from vtoken.protocol.step import RequestStep
from vtoken.runtime.requests import RequestState
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable


class GrownRequest(msgspec.Struct, gc=False):
    """A scheduled request after allocation: its whole block table and its tokens so far."""

    request_id: str
    block_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    seed: int
    num_prefill_tokens: int = 0  # when first scheduled: tokens to compute before it decodes


class TokenAppender:
    """Places the new tokens of one runtime's requests."""

    def __init__(self, state: RuntimeState) -> None:
        self._state = state
        self._tables = state.tables  # who asks anything here has caught up with the engine
        self._with_hole: list[RequestState] = []  # in the step being planned

    def pick_holes(self) -> bool:
        """Choose the hole that each request's next single token is written to.

        Whether a request with holes holds more blocks than its live tokens and the next one need.
        """
        state = self._state
        recycling = state.config.recycle and state.config.reclamation != "off"
        size = state.geometry.block_size
        spare = False
        for request in self._with_hole:
            request.hole = None
        self._with_hole.clear()
        for table in self._tables:
            if table.extent == table.num_live:
                continue
            if recycling:
                request = state.requests[table.request_id]
                request.hole = table.first_hole(request.readonly)
                self._with_hole.append(request)
            spare = spare or len(table.blocks) > table.num_live // size + 1
        return spare

    def required_extent(self, request_id: str, num_new: int) -> int | None:
        """Places that must exist for `num_new` more tokens; None when the layout is positional."""
        table = self._tables.get(request_id)
        if table is None or not table.virtual:
            return None
        request = self._state.requests[request_id]
        if num_new == 1 and request.hole is not None:
            return table.extent
        if not request.readonly:
            return table.extent + num_new
        return table.append_start(request.readonly) + num_new

    def enter(self, grown: Iterable[GrownRequest]) -> None:
        """Register the new tokens of all scheduled requests."""
        state, tables = self._state, self._tables
        known, pending, is_writable = tables.get, state.pending, state.store.is_writable
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
        state = self._state
        request_id = request.request_id
        state.admit(
            RequestState(
                request_id,
                request.num_prompt_tokens,
                max(request.num_prompt_tokens, request.num_prefill_tokens),
                request.seed,
                state.step,
            )
        )
        self._tables.sync_new_tokens(request_id, request.block_ids, request.num_tokens)

    def _next_place(self, table: TokenTable) -> int:
        """Where the next token of a request that has evicted something goes.

        Asked before the blocks of this step join: a block that left and came back is private now.
        """
        request = self._state.requests[table.request_id]
        if request.hole is not None:
            request.recycled_slots += 1
            self._state.counters.recycled_slots += 1
            return request.hole
        return table.append_start(request.readonly) if request.readonly else table.extent

    def _enter_several(self, table: TokenTable, request: GrownRequest) -> None:
        state = self._state
        start = None
        part = None
        if table.virtual:
            start = table.append_start(state.requests[table.request_id].readonly)
            part = state.pending(table)
        slots = self._tables.sync_new_tokens(
            table.request_id, request.block_ids, request.num_tokens, start
        )
        if part is not None:
            part.new_slots = slots
            for block in np.unique(slots // table.block_size).tolist():
                if not state.store.is_writable(block):
                    self._not_private(block)

    def _not_private(self, block: int) -> None:
        self._state.violated(InvariantViolation("I4", f"block {block} is written, not private"))

    def lend_scratch(self, parts: Mapping[str, RequestStep]) -> None:
        """Free blocks for packing the holey requests that decode one token in this step."""
        state = self._state
        size = state.geometry.block_size
        needs: dict[str, int] = {}
        for request_id, part in parts.items():
            if not part.dense and len(part.new_slots) == 1:
                _, loose = self._tables[request_id].full_and_loose()
                needs[request_id] = -(-len(loose) // size)
        if not needs:
            return
        lent = state.store.lend(sum(needs.values()))
        first = 0
        for request_id, need in needs.items():
            if first + need <= len(lent):
                parts[request_id].scratch = lent[first : first + need]
                first += need
