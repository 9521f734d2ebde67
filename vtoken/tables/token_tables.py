"""All token tables and the pool's liveness, behind the three calls of the paper (section 3.2).

Knows neither policies nor planners nor vLLM. A policy's victims come in through `evict_token`, the
engine's growth through `sync_new_tokens`, the relocation backend's result through `apply_moves`.
The batch forms `grow` and `evict` take columns and are what the runtime uses.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Bools, Ints, Ragged
from vtoken.errors import InvariantViolation, UnknownRequestError
from vtoken.tables import kernels
from vtoken.tables.columns import Columns, Int32s
from vtoken.tables.pool import PoolLiveness
from vtoken.tables.token_table import TokenTable

MAX_NUMBER = 65_535
ONE = np.uint16(1)  # `ufunc.at` is a hundred times slower where it has to cast
NO_BLOCKS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class AppendedTokens:
    """Slots of the new tokens: those of request i are slots[starts[i]:starts[i + 1]].

    `written`: the blocks that requests that have evicted write to. `num_recycled`: tokens that went
    into a hole.
    """

    slots: Ints
    starts: Ints
    written: Ints
    num_recycled: int


@dataclass(frozen=True, slots=True)
class Places:
    """By row: `num_tokens` now; `next_extent`, the places that must exist for a single new token,
    and `start`, the first place of several. `spare`: a request with holes holds more blocks than
    its live tokens and the next one need.
    """

    num_tokens: list[int]
    next_extent: list[int]
    start: list[int]
    spare: bool


class TokenTables:
    """The tables of all requests that hold blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = PoolLiveness(num_blocks, block_size)
        self.block_size = block_size
        self.columns = Columns(block_size)
        self.rows: dict[str, int] = {}  # of the requests that have a table
        self.names: list[str] = []  # by row, of the newest request that had it
        self._tables: dict[str, TokenTable] = {}
        self._free_numbers: list[int] = []  # heap of those that were given before
        self._last_number = 0  # the highest one that was given
        self.num_changes = 0  # tables made and released, ever
        self._wrong: Ints = np.zeros(3, dtype=np.int64)
        self._rank: Int32s = np.full(num_blocks, -1, dtype=np.int32)
        self._old_rank: Int32s = np.full(num_blocks, -1, dtype=np.int32)

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

    @property
    def all_rows(self) -> Ints:
        """The rows of all tables [R], oldest table first."""
        return np.fromiter(self.rows.values(), dtype=np.int64, count=len(self.rows))

    @property
    def any_virtual(self) -> bool:
        """Whether any request has left the identity layout."""
        return bool(self.columns.virtual.any())

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, room that is not used included."""
        return self.columns.num_bytes + self.pool.num_bytes

    # ------------------------------------------------------------ growth

    def add(self, request_id: str) -> TokenTable:
        """The table of a new request, without tokens and blocks."""
        row = self.columns.take_row(self._take_number())
        table = self._tables[request_id] = TokenTable(request_id, self.columns, row)
        self.rows[request_id] = row
        self.names[row : row + 1] = [request_id]
        self.num_changes += 1
        return table

    def grow(self, rows: Ints, totals: Ints, joined_starts: Ints, joined: Ints) -> AppendedTokens:
        """Requests `rows` [k] now have `totals` [k] tokens, and the blocks
        joined[joined_starts[i]:joined_starts[i + 1]] beside those they had.

        A single new token goes into the row's hole where one was chosen, others behind the last
        one. Raises InvariantViolation when blocks are too few, a place is taken or tokens were
        lost; requests before that one have grown then.
        """
        columns, pool = self.columns, self.pool
        num_new = int((totals - columns.num_tokens[rows]).sum())
        slots, written = np.empty((2, max(num_new, 0)), dtype=np.int64)
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        counted = np.zeros(2, dtype=np.int64)
        first = 0
        while first < len(rows):
            code, first = kernels.append(
                first, rows, totals, joined_starts, joined, self.block_size,
                columns.records, columns.index, columns.born_live, columns.token_at,
                columns.block_id, columns.block_live, columns.readonly,
                pool.readers, pool.live, pool.holders, pool.usage, pool.owner, pool.counts,
                slots, starts, written, counted, self._wrong,
            )  # fmt: skip
            if code == kernels.NO_ROOM:
                row = int(rows[first])
                more = int(joined_starts[first + 1] - joined_starts[first])
                columns.reserve(row, int(totals[first]), int(columns.num_blocks[row]) + more)
            elif code != kernels.DONE:
                self._refuse_growth(code, int(rows[first]), int(totals[first]))
        num_written, num_recycled = counted.tolist()
        return AppendedTokens(slots, starts, written[:num_written], num_recycled)

    def _refuse_growth(self, code: int, row: int, total: int) -> NoReturn:
        name, wrong = self.names[row], self._wrong
        if code == kernels.OCCUPIED:
            raise InvariantViolation("I2", f"{name}: place {wrong[0]} is occupied")
        if code == kernels.NO_BLOCK:
            raise InvariantViolation("I4", f"{name} holds {wrong[0]}, which is no block")
        if code == kernels.SHRANK:
            raise InvariantViolation(
                "I4", f"{name} has {total} tokens, its table {self.columns.num_tokens[row]}"
            )
        raise InvariantViolation(
            "I4",
            f"{wrong[0]} tokens at index {wrong[1]} do not fit {wrong[2]} blocks "
            f"of {self.block_size} (request {name})",
        )

    def sync_new_tokens(self, request_id: str, block_ids: Sequence[int], total_len: int) -> Ints:
        """Register the tokens that `request_id` gained; a new request gets its table.

        `block_ids` is the request's whole block table (it may only have grown), `total_len` its
        tokens so far, dead ones included. Returns the slots of the new tokens.
        """
        table = self._tables.get(request_id) or self.add(request_id)
        known = table.num_blocks
        if len(block_ids) < known:
            raise InvariantViolation(
                "I4", f"{request_id} holds {len(block_ids)} blocks, its table has {known}"
            )
        joined = np.asarray(block_ids[known:], dtype=np.int64)
        return self.grow(
            np.array([table.row]), np.array([total_len]), np.array([0, len(joined)]), joined
        ).slots

    def choose_places(self, *, recycling: bool) -> Places:
        """Choose where each request's next single token goes: a hole, if `recycling`, or behind."""
        columns = self.columns
        next_extent, start = np.zeros((2, columns.num_rows), dtype=np.int64)
        spare = kernels.choose_places(
            self.block_size, recycling, columns.num_rows,
            columns.records, columns.token_at, columns.readonly, next_extent, start,
        )  # fmt: skip
        num_tokens = columns.num_tokens.tolist()
        return Places(num_tokens, next_extent.tolist(), start.tolist(), bool(spare))

    # ------------------------------------------------------------ eviction and relocation

    def num_live_in(self, rows: Ints, spans: Ragged) -> Ints:
        """Of each of `rows` [k] how many live tokens are in `spans`, pairs of start and end [k]."""
        out = np.empty(len(rows), dtype=np.int64)
        columns = self.columns
        kernels.num_live_in(rows, spans.starts, spans.values, columns.records, columns.index, out)
        return out

    def evict(
        self, rows: Ints, starts: Ints, ids: Ints, owed: Ints, protected: Ragged
    ) -> tuple[Ints, Ints]:
        """ids[starts[i]:starts[i + 1]], ascending, of the requests `rows` [k] die.

        `owed` [k]: how many must be named, and the newest token spared; -1: any. None may be in
        `protected`, pairs of start and end for each request [k]. A request whose
        ids are refused is not changed. Returns codes of `kernels` [k], and how many blocks of each
        request [k] lost their last live token.
        """
        columns, pool = self.columns, self.pool
        codes = np.empty(len(rows), dtype=np.int64)
        num_emptied = np.empty(len(rows), dtype=np.int64)
        kernels.evict(
            rows, starts, ids, owed, protected.starts, protected.values, self.block_size,
            columns.records, columns.index, columns.born_live, columns.token_at,
            columns.block_id, columns.block_live, pool.readers, pool.live, pool.counts,
            codes, num_emptied,
        )  # fmt: skip
        return codes, num_emptied

    def evict_token(self, request_id: str, token_id: int) -> None:
        """Mark one token dead: attention does not read it from the next step on."""
        self.evict_tokens(request_id, np.array([token_id], dtype=np.int64))

    def evict_tokens(self, request_id: str, token_ids: Ints) -> None:
        """Batch form of `evict_token`, in any order; all or nothing."""
        row = np.array([self[request_id].row])
        ids = np.sort(token_ids)
        starts = np.array([0, len(ids)])
        codes, _ = self.evict(row, starts, ids, np.array([-1]), Ragged.empty(1))
        if codes[0] == kernels.DEAD:
            raise InvariantViolation("I2", f"a victim of {request_id} is already dead")
        if codes[0] != kernels.DONE:
            raise InvariantViolation("I2", f"victims of {request_id} are unknown or doubled")

    def apply_moves(
        self, request_id: str, token_ids: Ints, slots: Ints, block_ids: Sequence[int] | Ints
    ) -> list[int]:
        """Commit a relocation: live tokens `token_ids` [k] now live in `slots` [k], and `block_ids`
        is the block table.

        Blocks that are new in it become held, blocks that are missing are dropped and returned.
        Atomic: everything is verified first (I2: destinations are distinct and carry no live token;
        no live token stays in a dropped block), and a violation changes nothing.
        """
        table, columns, pool = self[request_id], self.columns, self.pool
        blocks = np.asarray(block_ids, dtype=np.int64)
        columns.reserve(table.row, table.num_tokens, len(blocks))
        dropped = np.empty(table.num_blocks, dtype=np.int64)
        code, num_dropped = kernels.relocate(
            table.row, token_ids, slots, blocks, self.block_size,
            columns.records, columns.index, columns.token_at,
            columns.block_id, columns.block_live, columns.readonly,
            pool.readers, pool.live, pool.holders, pool.usage, pool.owner, pool.owner_stale,
            pool.counts, self._rank, self._old_rank, dropped, self._wrong,
        )  # fmt: skip
        if code != kernels.DONE:
            self._refuse_moves(code, table)
        out: list[int] = dropped[:num_dropped].tolist()
        return out

    def drop_blocks(self, table: TokenTable, leaves: Bools) -> list[int]:
        """Let go of the blocks where `leaves` [num_blocks], of which none has a live token.

        Returns them. Raises InvariantViolation, with nothing changed, where one has.
        """
        columns, pool = self.columns, self.pool
        dropped = np.empty(len(leaves), dtype=np.int64)
        code, num_dropped = kernels.drop_blocks(
            table.row, leaves, self.block_size,
            columns.records, columns.index, columns.token_at,
            columns.block_id, columns.block_live, columns.readonly,
            pool.holders, pool.usage, pool.owner, pool.owner_stale, pool.counts, dropped,
        )  # fmt: skip
        if code != kernels.DONE:
            raise InvariantViolation("I1", f"a block with live tokens of {table.request_id} leaves")
        out: list[int] = dropped[:num_dropped].tolist()
        return out

    def _refuse_moves(self, code: int, table: TokenTable) -> NoReturn:
        name, what = table.request_id, int(self._wrong[0])
        if code == kernels.DEAD:
            raise InvariantViolation("I1", f"a moved token of {name} is not live")
        if code == kernels.LOST:
            raise InvariantViolation(
                "I1",
                f"{table.num_live} live tokens of {name} before the relocation, {what} after",
            )
        reasons = {
            kernels.DOUBLED_BLOCK: f"new table of {name} doubles a block",
            kernels.NO_BLOCK: f"new table of {name} has {what}, which is no block",
            kernels.OUTSIDE: f"destination {what} is not in the table of {name}",
            kernels.TAKEN: f"a destination of {name} is doubled or holds a live token",
        }
        raise InvariantViolation("I2", reasons[code])

    def release(self, request_id: str) -> bool:
        """Forget a finished or preempted request; whether it had a table."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return False
        columns, pool = self.columns, self.pool
        number = table.number
        kernels.release(
            table.row, self.block_size, columns.records, columns.index, columns.block_id,
            pool.readers, pool.live, pool.holders, pool.usage, pool.owner, pool.owner_stale,
            pool.counts,
        )  # fmt: skip
        columns.give_back_row(table.row)
        del self.rows[request_id]
        self.num_changes += 1
        if number:
            heapq.heappush(self._free_numbers, number)
        return True

    def _take_number(self) -> int:
        """The smallest number that no table has; 0 when all are given."""
        if self._free_numbers:
            return heapq.heappop(self._free_numbers)
        if self._last_number == MAX_NUMBER:
            return 0
        self._last_number += 1
        return self._last_number

    # ------------------------------------------------------------ the pool's view

    def tails(self) -> Ints:
        """The block that each request with blocks appends to."""
        rows = self.all_rows
        facts = self.columns.facts[rows]
        facts = facts[facts["num_blocks"] > 0]
        tails: Ints = self.columns.block_id[facts["first_block"] + facts["num_blocks"] - 1]
        return tails.astype(np.int64)

    def owners(self) -> npt.NDArray[np.uint16]:
        """Number of the newest holder of each block [N], 0 for free ones; not to be written."""
        pool = self.pool
        unknown = np.flatnonzero(pool.owner_stale)
        if len(unknown):
            pool.owner_stale[unknown] = False
            unknown = unknown[pool.holders[unknown] > 0]
            for table in reversed(self._tables.values()):
                if len(unknown) == 0:
                    break
                held = np.isin(unknown, table.block_ids())
                pool.owner[unknown[held]] = table.number
                unknown = unknown[~held]
        return pool.owner

    # ------------------------------------------------------------ checking

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
        self._check_holders()

    def _check_holders(self) -> None:
        numbers = [table.number for table in self if table.number]
        if len(set(numbers)) != len(numbers):
            raise InvariantViolation("I2", "two tables have the same number")
        pool = self.pool
        owner, holders = np.zeros_like(pool.owner), np.zeros_like(pool.holders)
        for table in self:
            blocks = table.block_ids()
            owner[blocks] = table.number
            np.add.at(holders, blocks, ONE)
        for name, told, counted in (
            ("holders", pool.holders, holders),
            ("owner", np.where(pool.owner_stale, owner, pool.owner), owner),
        ):
            wrong = np.flatnonzero(told != counted)
            if len(wrong):
                block = int(wrong[0])
                raise InvariantViolation(
                    "I2",
                    f"{name}[{block}] = {told[block]}, but by the tables, of which the newest "
                    f"holder owns a block, it is {counted[block]}",
                )
