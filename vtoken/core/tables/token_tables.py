"""All token tables and the pool's liveness, changed by the three calls of the paper (section 3.2).

`grow` adds the engine's new tokens (the paper's sync_new_tokens), `evict` a policy's victims
(evict_token), `apply_moves` the result of a relocation. `truncate` takes back what `grow` added,
`restore` what `evict` did to tokens with a copy.
Independent of policies, planners and vLLM.

Invariants:
1. a slot's readers are exactly the requests whose table maps a live token to it; two requests may
   read one slot only in a block that both hold (shared prefix)
2. existing tables have distinct numbers, 1 to `MAX_NUMBER`; a released number is reused. Once all
   are in use, further tables get 0
3. owner[b] is the number of the newest table that holds b: a block enters a second table only when
   that table is created (prefix cache), so the newest table is the newest holder
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Bools, Ints, Ragged
from vtoken.base.errors import InvariantViolation, UnknownRequestError
from vtoken.core.tables import kernels
from vtoken.core.tables.columns import Columns, Int32s
from vtoken.core.tables.pool import PoolLiveness
from vtoken.core.tables.token_table import TokenTable

MAX_NUMBER = 65_535
ONE = np.uint16(1)  # `ufunc.at` is a hundred times slower when it has to cast

# Why a kernel refuses a request: the invariant, and its `detail` in words.
REFUSALS = {
    kernels.OCCUPIED: ("I2", "{name}: place {0} is occupied"),
    kernels.NO_PLACE: (
        "I4",
        "{0} tokens at index {1} do not fit {2} blocks of {block_size} (request {name})",
    ),
    kernels.NO_BLOCK: ("I4", "the table of {name} is to have {0}, which is no block"),
    kernels.CROWDED: (
        "I4",
        f"{{name}} is holder {kernels.MAX_HOLDERS + 1:,} of block {{0}}: too many",
    ),
    kernels.SHRANK: ("I4", "{name} is to have {total} tokens, its table has {facts[num_tokens]}"),
    kernels.DEAD: ("I1", "a moved token of {name} is not live"),
    kernels.LOST: (
        "I1",
        "{facts[num_live]} live tokens of {name} before the relocation, {0} after",
    ),
    kernels.DUPLICATE_BLOCK: ("I2", "the new table of {name} contains a block twice"),
    kernels.OUTSIDE: ("I2", "destination block {0} is not in the table of {name}"),
    kernels.TAKEN: ("I2", "a destination slot of {name} is used twice or holds a live token"),
    kernels.UNKNOWN: ("I1", "restored tokens of {name}: {0} is unknown or out of order"),
    kernels.NO_COPY: ("I1", "token {0} of {name} is live, or has no copy to be restored from"),
    kernels.NO_HOLE: ("I2", "token {0} of {name} cannot be restored to place {1}"),
}


class AppendedTokens(NamedTuple):
    """The slots of new tokens; request i has slots[starts[i]:starts[i + 1]].

    `written`: blocks written by requests that have evicted. `num_recycled`: tokens written into a
    hole.
    """

    slots: Ints
    starts: Ints
    written: Ints
    num_recycled: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where requests write next, by row.

    `num_tokens`: current count; `next_extent`: places that a single new token requires; `start`:
    first place of several new tokens. `spare`: some request with holes holds more blocks than its
    live tokens and the next one need.
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
        self.rows: dict[str, int] = {}  # by request id
        self.names: list[str] = []  # request ids by row, of the newest request in it
        self._tables: dict[str, TokenTable] = {}
        self._free_numbers: list[int] = []  # heap of released numbers
        self._last_number = 0  # the highest number assigned so far
        self.num_changes = 0  # tables created and released since the start
        self._asked: list[str] = []  # `names` of the newest `rows_of`, at `num_changes`
        self._asked_at = 0
        self._answer: Ints = np.zeros(0, dtype=np.int64)
        self._detail: Ints = np.zeros(3, dtype=np.int64)
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

    def at(self, row: int) -> TokenTable:
        """The table in `row`, which must be in use."""
        return self._tables[self.names[row]]

    def rows_of(self, names: list[str]) -> Ints:
        """The rows [k] of those of `names` that have a table; do not write to them.

        The newest answer is kept: within a step, and in most steps, it is asked for again.
        """
        if self._asked_at != self.num_changes or self._asked != names:
            known = self.rows
            rows = [known[name] for name in names if name in known]
            self._answer = np.array(rows, dtype=np.int64)
            self._asked, self._asked_at = names.copy(), self.num_changes
        return self._answer

    @property
    def all_rows(self) -> Ints:
        """The rows of all tables [R], oldest table first."""
        return np.fromiter(self.rows.values(), dtype=np.int64, count=len(self.rows))

    @property
    def any_virtual(self) -> bool:
        """Whether any request's layout is no longer the identity."""
        return bool(np.count_nonzero(self.columns.virtual))

    # ------------------------------------------------------------ growth

    def add(self, request_id: str) -> TokenTable:
        """Create the table of a new request, without tokens and blocks."""
        row = self.columns.take_row(self._take_number())
        table = self._tables[request_id] = TokenTable(request_id, self.columns, row)
        self.rows[request_id] = row
        self.names[row : row + 1] = [request_id]
        self.num_changes += 1
        return table

    def grow(self, rows: Ints, totals: Ints, added: Ragged) -> AppendedTokens:
        """Grow requests `rows` [k] to `totals` [k] tokens, with the `added` blocks of each.

        A single new token goes into the row's hole if one was chosen, others behind the last one.
        Raises InvariantViolation when blocks are too few, a place is occupied or the total shrank;
        requests before that one have grown by then.
        """
        columns = self.columns
        num_new = int((totals - columns.num_tokens[rows]).sum())
        slots, written = np.empty((2, max(num_new, 0)), dtype=np.int64)
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        counted = np.zeros(2, dtype=np.int64)
        first = 0
        while first < len(rows):
            code, first = kernels.append(
                first, rows, totals, added, self.block_size, columns.arrays, self.pool.arrays,
                slots, starts, written, counted, self._detail,
            )  # fmt: skip
            if code == kernels.NO_CAPACITY:
                row = int(rows[first])
                more = int(added.counts[first])
                columns.reserve(row, int(totals[first]), int(columns.num_blocks[row]) + more)
            elif code != kernels.DONE:
                self._refuse(code, int(rows[first]), int(totals[first]))
        num_written, num_recycled = counted.tolist()
        return AppendedTokens(slots, starts, written[:num_written], num_recycled)

    def truncate(self, rows: Ints, totals: Ints) -> None:
        """Remove the newest tokens of requests `rows` [k], distinct, which keep `totals` [k].

        Their slots are free for other tokens of the request; its blocks stay. Raises
        InvariantViolation, without any change, if a request has fewer tokens than its total.
        """
        code, at = kernels.truncate(
            rows, totals, self.block_size, self.columns.arrays, self.pool.arrays
        )
        if code != kernels.DONE:
            self._refuse(code, int(rows[at]), int(totals[at]))

    def growth(self, rows: Ints, num_new: Ints, *, recycling: bool) -> Ints:
        """The blocks [k] that each of `rows` [k] takes, beyond those it holds, for `num_new` [k]
        more tokens; with `recycling` the first one may take a hole.
        """
        out = np.empty(len(rows), dtype=np.int64)
        kernels.growth(rows, num_new, recycling, self.block_size, self.columns.arrays, out)
        return out

    def choose_places(self, *, recycling: bool) -> Places:
        """Choose where each request's next single token goes: a hole if `recycling`, or the end."""
        columns = self.columns
        next_extent, start = np.zeros((2, columns.num_rows), dtype=np.int64)
        spare = kernels.choose_places(
            self.block_size, recycling, columns.num_rows, columns.arrays, next_extent, start
        )
        num_tokens = columns.num_tokens.tolist()
        return Places(num_tokens, next_extent.tolist(), start.tolist(), bool(spare))

    def num_private_blocks(self, rows: Ints) -> Ints:
        """How many of the blocks of each of `rows` [k] nobody else holds [k]."""
        if not self.pool.num_shared:
            return self.columns.num_blocks[rows]
        out = np.empty(len(rows), dtype=np.int64)
        kernels.num_private(rows, self.columns.arrays, self.pool.holders, out)
        return out

    # ------------------------------------------------------------ eviction and relocation

    def num_live_in(self, rows: Ints, spans: Ragged) -> Ints:
        """Count the live tokens [k] of `rows` [k] within their `spans`, (start, end) pairs."""
        out = np.empty(len(rows), dtype=np.int64)
        kernels.num_live_in(rows, spans, self.columns.arrays, out)
        return out

    def evict(
        self, rows: Ints, victims: Ragged, num_due: Ints, protected: Ragged
    ) -> tuple[Ints, Ints]:
        """Mark tokens dead: the `victims` of each request of `rows` [k], ascending.

        Attention does not read them from the next step on. `num_due` [k]: the required number of
        victims, the newest token excluded; -1: any. `protected`: (start, end) pairs of each request
        [k] that must contain no victim. A refused request is unchanged. Returns codes of `kernels`
        [k], and how many blocks of each request [k] lost their last live token.
        """
        codes = np.empty(len(rows), dtype=np.int64)
        num_emptied = np.empty(len(rows), dtype=np.int64)
        kernels.evict(
            rows, victims, num_due, protected, self.block_size,
            self.columns.arrays, self.pool.arrays, codes, num_emptied,
        )  # fmt: skip
        return codes, num_emptied

    def apply_moves(
        self, request_id: str, token_ids: Ints, slots: Ints, block_ids: Sequence[int] | Ints
    ) -> list[int]:
        """Commit a relocation: move live tokens `token_ids` [k] to `slots` [k] and set the block
        table to `block_ids`.

        The request acquires blocks that are new in the table; missing ones are dropped and
        returned. Atomic: everything is verified first (I2: destinations are distinct and hold no
        live token; no live token stays in a dropped block), and a violation changes nothing.
        """
        table = self[request_id]
        blocks = np.asarray(block_ids, dtype=np.int64)
        self.columns.reserve(table.row, table.num_tokens, len(blocks))
        dropped = np.empty(table.num_blocks, dtype=np.int64)
        code, num_dropped = kernels.relocate(
            table.row, token_ids, slots, blocks, self.block_size,
            self.columns.arrays, self.pool.arrays,
            self._rank, self._old_rank, dropped, self._detail,
        )  # fmt: skip
        if code != kernels.DONE:
            self._refuse(code, table.row)
        out: list[int] = dropped[:num_dropped].tolist()
        return out

    # ------------------------------------------------------------ parking

    def note_copies(self, row: int, ids: Ints, hosts: Ints) -> None:
        """Note that the dead tokens `ids` [k] of `row` have their first copy, in `hosts` [k]."""
        kernels.note_copies(row, ids, hosts, self.columns.arrays)

    def drop_copies(self, rows: Ints, ids: Ints) -> int:
        """Give up the copies of the tokens ids[n] of rows[n], n < k; returns how many are dead."""
        return int(kernels.drop_copies(rows, ids, self.columns.arrays))

    def open_places(self, row: int, most: int) -> Ints:
        """The first places of `row` that a token may be restored to, at most `most`, ascending."""
        out = np.empty(most, dtype=np.int64)
        found = kernels.open_places(row, self.block_size, self.columns.arrays, out)
        return out[:found]

    def restore(self, row: int, ids: Ints, places: Ints, added: Ints) -> Ints:
        """Make the parked tokens `ids` [k] live at `places` [k], both ascending; returns their
        slots.

        The request gains the blocks `added` behind its others. Raises InvariantViolation, without
        any change, for a token without a copy or a place that is taken or read-only.
        """
        columns, slots = self.columns, np.empty(len(ids), dtype=np.int64)
        num_blocks = int(columns.num_blocks[row])
        columns.reserve(row, int(columns.num_tokens[row]), num_blocks + len(added))
        code = kernels.restore(
            row, ids, places, added, self.block_size, columns.arrays, self.pool.arrays,
            slots, self._detail,
        )  # fmt: skip
        if code != kernels.DONE:
            self._refuse(code, row)
        return slots

    def start_dead(self, row: int, num_tokens: int) -> None:
        """Let the new request of `row` have `num_tokens` tokens, all dead and in no slot."""
        self.columns.reserve(row, num_tokens, 0)
        self.columns.num_tokens[row], self.columns.virtual[row] = num_tokens, 1

    def end_start(self, row: int, *, virtual: bool, num_restored: int) -> None:
        """The live tokens of a `row` that started dead are restored, of which `num_restored` had
        come back before. Not `virtual`: none has died, and each is in its own place.
        """
        self.columns.virtual[row], self.columns.num_restored[row] = virtual, num_restored

    # ------------------------------------------------------------ blocks

    def drop_blocks(self, table: TokenTable, leaves: Bools) -> list[int]:
        """Drop the blocks where `leaves` [num_blocks] is set and return them.

        Raises InvariantViolation, without any change, if one of them has a live token.
        """
        dropped = np.empty(len(leaves), dtype=np.int64)
        code, num_dropped = kernels.drop_blocks(
            table.row, leaves, self.block_size, self.columns.arrays, self.pool.arrays, dropped
        )
        if code != kernels.DONE:
            raise InvariantViolation("I1", f"a dropped block of {table.request_id} has live tokens")
        out: list[int] = dropped[:num_dropped].tolist()
        return out

    def _refuse(self, code: int, row: int, total: int = 0) -> NoReturn:
        """Raise what a kernel found wrong with the request of `row`, which is to have `total`."""
        invariant, text = REFUSALS[code]
        facts, block_size = self.columns.facts[row], self.block_size
        detail = text.format(
            *self._detail, name=self.names[row], facts=facts, total=total, block_size=block_size
        )
        raise InvariantViolation(invariant, detail)

    def release(self, request_id: str) -> None:
        """Remove a finished or preempted request."""
        table = self[request_id]
        del self._tables[request_id]
        number = table.number
        kernels.release(table.row, self.block_size, self.columns.arrays, self.pool.arrays)
        self.columns.give_back(table.row)
        del self.rows[request_id]
        self.num_changes += 1
        if number:
            heapq.heappush(self._free_numbers, number)

    def _take_number(self) -> int:
        """The smallest unused number; 0 when all are in use."""
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
        last = facts["first_block"] + facts["gap"] + facts["num_blocks"] - 1
        tails: Ints = self.columns.arrays.block_id[last]
        return tails.astype(np.int64)

    def owners(self) -> npt.NDArray[np.uint16]:
        """The number of each block's newest holder [N], 0 for free blocks; do not write to it."""
        pool = self.pool
        stale = np.flatnonzero(pool.owner_stale)
        if len(stale):
            pool.owner_stale[stale] = False
            stale = stale[pool.holders[stale] > 0]
            for table in reversed(self._tables.values()):
                if len(stale) == 0:
                    break
                held = np.isin(stale, table.block_ids())
                pool.owner[stale[held]] = table.number
                stale = stale[~held]
        return pool.owner

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Check every table, the pool, and that both agree (I2 over all requests; owners)."""
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
        for name, recorded, counted in (
            ("holders", pool.holders, holders),
            ("owner", np.where(pool.owner_stale, owner, pool.owner), owner),
        ):
            wrong = np.flatnonzero(recorded != counted)
            if len(wrong):
                block = int(wrong[0])
                raise InvariantViolation(
                    "I2",
                    f"{name}[{block}] = {recorded[block]}, but the tables give {counted[block]}",
                )
