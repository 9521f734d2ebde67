"""All token tables and the pool's liveness, behind the three calls of the paper (section 3.2).

Knows neither policies nor planners nor vLLM. A policy's victims come in through `evict_token`, the
engine's growth through `sync_new_tokens`, the relocation backend's result through `apply_moves`;
the batch forms take arrays and are what the runtime uses.

Invariant: a slot's readers are exactly the requests whose table maps a live token to it; two
requests may read one slot only in a block that both hold (shared prefix).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vtoken.errors import InvariantViolation, UnknownRequestError
from vtoken.pool import PoolLiveness, Slots
from vtoken.table import Ids, TokenTable


class TokenTables:
    """The tables of all requests that hold blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = PoolLiveness(num_blocks, block_size)
        self.block_size = block_size
        self._tables: dict[str, TokenTable] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def __iter__(self) -> Iterator[TokenTable]:
        return iter(self._tables.values())

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, request_id: str) -> TokenTable:
        try:
            return self._tables[request_id]
        except KeyError:
            raise UnknownRequestError(request_id) from None

    def get(self, request_id: str) -> TokenTable | None:
        return self._tables.get(request_id)

    def sync_new_tokens(
        self, request_id: str, block_ids: Sequence[int], total_len: int, start: int | None = None
    ) -> Slots:
        """Register the tokens that `request_id` gained; a new request gets its table.

        `block_ids` is the request's whole block table (it may only have grown), `total_len` its
        tokens so far, dead ones included. They go to index `start` on, see `TokenTable.place`.
        Returns the slots of the new tokens.
        """
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = TokenTable(request_id, self.pool)
        self.sync_blocks(table, block_ids)
        slots = table.place(total_len - table.num_tokens, start)
        self.pool.add(slots)
        return slots

    def sync_blocks(self, table: TokenTable, block_ids: Sequence[int]) -> None:
        """`block_ids` is the whole block table of `table`'s request; it may only have grown."""
        known = len(table.blocks)
        if len(block_ids) > known:
            table.extend_blocks(block_ids[known:])
        elif len(block_ids) < known:
            raise InvariantViolation(
                "I4", f"{table.request_id} holds {len(block_ids)} blocks, its table has {known}"
            )

    def evict_token(self, request_id: str, token_id: int) -> None:
        """Mark one token dead: attention does not read it from the next step on."""
        self.evict_tokens(request_id, np.array([token_id], dtype=np.int64))

    def evict_tokens(self, request_id: str, token_ids: Ids) -> None:
        """Batch form of `evict_token`; all or nothing."""
        self[request_id].evict(token_ids)

    def apply_moves(
        self, request_id: str, token_ids: Ids, slots: Slots, block_ids: Sequence[int]
    ) -> list[int]:
        """Commit a relocation, see `TokenTable.apply_moves`; returns the blocks let go."""
        return self[request_id].apply_moves(token_ids, slots, block_ids)

    def release(self, request_id: str) -> TokenTable | None:
        """Forget a finished or preempted request; returns its (now empty) table if it had one."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            table.release()
        return table

    def check(self) -> None:
        """Every table, the pool, and that both agree (I2 over all requests)."""
        self.pool.check()
        readers = np.zeros_like(self.pool.readers)
        for table in self:
            table.check()
            slots = table.slots_of(table.live_ids())
            np.add.at(readers, slots, 1)
        wrong = np.flatnonzero(readers != self.pool.readers)
        if len(wrong):
            slot = int(wrong[0])
            raise InvariantViolation(
                "I2",
                f"slot {slot} has {self.pool.readers[slot]} readers, "
                f"but {readers[slot]} live tokens map to it",
            )
