"""All token tables and the pool's liveness, behind the three calls of the paper (section 3.2).

Knows neither policies nor planners nor vLLM. A policy's victims come in through `evict_token`, the
engine's growth through `sync_new_tokens`, the relocation backend's result through `apply_moves`;
the batch forms take arrays and are what the runtime uses.

Invariants:
1. a slot's readers are exactly the requests whose table maps a live token to it; two requests may
   read one slot only in a block that both hold (shared prefix)
2. tables that exist at the same time have different numbers, 1 to `MAX_NUMBER`; the number of a
   table that is gone is given to the next one. Tables beyond that are unnamed: 0
3. owner[b] is the number of the newest table that holds b: a block joins a second table only when
   that table is made (prefix cache), so the newest table is the newest holder
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Ints
from vtoken.errors import InvariantViolation, UnknownRequestError
from vtoken.tables.pool import ONE, PoolLiveness
from vtoken.tables.token_table import TokenTable

MAX_NUMBER = 65_535


class TokenTables:
    """The tables of all requests that hold blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = PoolLiveness(num_blocks, block_size)
        self.block_size = block_size
        self._tables: dict[str, TokenTable] = {}
        self._free_numbers: list[int] = []  # heap of those that were given before
        self._last_number = 0  # the highest one that was given
        self.num_changes = 0  # tables made and released, ever

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
    ) -> Ints:
        """Register the tokens that `request_id` gained; a new request gets its table.

        `block_ids` is the request's whole block table (it may only have grown), `total_len` its
        tokens so far, dead ones included. They go to index `start` on, see `TokenTable.place`.
        Returns the slots of the new tokens.
        """
        table = self._tables.get(request_id)
        if table is None:
            self.num_changes += 1
            table = self._tables[request_id] = TokenTable(
                request_id, self.pool, self._take_number()
            )
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

    def catch_up(self, progress: Callable[[str, int], tuple[Sequence[int], int]]) -> None:
        """Register what every request has gained since its table was last told.

        `progress(request_id, n)`: its blocks beyond the first n, and its tokens so far. All tables
        must be positional.
        """
        gained: list[int] = []
        try:
            for table in self._tables.values():
                blocks, num_tokens = progress(table.request_id, len(table.blocks))
                if blocks:
                    table.extend_blocks(blocks)
                num_new = num_tokens - table.num_tokens
                if num_new < 0 or (num_new and table.virtual):
                    raise InvariantViolation(
                        "I4",
                        f"{table.request_id} has {num_tokens} tokens, its table {table.num_tokens}",
                    )
                gained += table.grow(num_new)
        finally:
            self.pool.add(np.array(gained, dtype=np.int64))

    def evict_token(self, request_id: str, token_id: int) -> None:
        """Mark one token dead: attention does not read it from the next step on."""
        self.evict_tokens(request_id, np.array([token_id], dtype=np.int64))

    def evict_tokens(self, request_id: str, token_ids: Ints) -> None:
        """Batch form of `evict_token`; all or nothing."""
        self[request_id].evict(token_ids)

    def apply_moves(
        self, request_id: str, token_ids: Ints, slots: Ints, block_ids: Sequence[int]
    ) -> list[int]:
        """Commit a relocation, see `TokenTable.apply_moves`; returns the blocks let go."""
        return self[request_id].apply_moves(token_ids, slots, block_ids)

    def release(self, request_id: str) -> TokenTable | None:
        """Forget a finished or preempted request; returns its (now empty) table if it had one."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            table.release()
            self.num_changes += 1
            if table.number:
                heapq.heappush(self._free_numbers, table.number)
        return table

    def _take_number(self) -> int:
        """The smallest number that no table has; 0 when all are given."""
        if self._free_numbers:
            return heapq.heappop(self._free_numbers)
        if self._last_number == MAX_NUMBER:
            return 0
        self._last_number += 1
        return self._last_number

    def owners(self) -> npt.NDArray[np.uint16]:
        """Number of the newest holder of each block [N], 0 for free ones; not to be written."""
        pool = self.pool
        if pool.any_bereaved:
            unknown = np.flatnonzero(pool.bereaved)
            pool.bereaved[unknown] = pool.any_bereaved = False
            unknown = unknown[pool.holders[unknown] > 0]
            for table in reversed(self._tables.values()):
                if len(unknown) == 0:
                    break
                held = np.isin(unknown, table.block_ids())
                pool.owner[unknown[held]] = table.number
                unknown = unknown[~held]
        return pool.owner

    def check(self) -> None:
        """Every table, the pool, and that both agree (I2 over all requests), owners included."""
        self.pool.check()
        readers = np.zeros_like(self.pool.readers)
        for table in self:
            table.check()
            slots = table.slots_of(table.live_ids())
            np.add.at(readers, slots, ONE)
        wrong = np.flatnonzero(readers != self.pool.readers)
        if len(wrong):
            slot = int(wrong[0])
            raise InvariantViolation(
                "I2",
                f"slot {slot} has {self.pool.readers[slot]} readers, "
                f"but {readers[slot]} live tokens map to it",
            )
        self._check_owners()

    def _check_owners(self) -> None:
        numbers = [table.number for table in self if table.number]
        if len(set(numbers)) != len(numbers):
            raise InvariantViolation("I2", "two tables have the same number")
        tails = {table.request_id: table.blocks[-1] if table.blocks else 0 for table in self}
        if tails != self.pool.tails:
            raise InvariantViolation("I2", f"tails are {self.pool.tails}, of the tables {tails}")
        owner = np.zeros_like(self.pool.owner)
        for table in self:
            owner[table.blocks] = table.number
        wrong = np.flatnonzero((owner != self.pool.owner) & ~self.pool.bereaved)
        if len(wrong):
            block = int(wrong[0])
            raise InvariantViolation(
                "I2",
                f"owner[{block}] = {self.pool.owner[block]}, "
                f"but the newest table that holds it is number {owner[block]}",
            )
