"""The worker's mirrors of the token tables: the slot of every live token of every request.

Updated by step plans only; independent of the scheduler's tables and of torch. Every plan's
absolute counts are verified, so a mirror with a wrong count stops the worker before the forward.
Correct counts with wrong slots are detected only by the content check (`verify_ratio`).

Rows are requests, columns are facts; a row is reused after its request ends. The slots of all
requests are stored in one int32 arena, 4 bytes per token, one contiguous segment per request with
slack at the end. Invariants of each row r in use, with o = first_token[r]:

1. slots[o + t] is the slot of token t < num_tokens[r], -1 when it is dead
2. num_live[r] = |{t < num_tokens[r]: slots[o + t] >= 0}|, counted by transitions
3. num_tokens[r] <= token_capacity[r], and segments slots[o : o + token_capacity[r]] do not overlap
4. (r, version[r]) identifies the state of existing tokens: the version changes when a token dies,
   moves, comes back or is taken back and when the row is reassigned, but not when tokens are
   appended
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.base.arena import Arena, Column
from vtoken.base.arrays import Ints, Ragged, starts_of
from vtoken.base.compiled import kernel
from vtoken.base.errors import MirrorMismatchError
from vtoken.base.rows import Rows
from vtoken.core.protocol.step import RequestSteps
from vtoken.policies.signals import Accumulator, SeenKeys, Signal

MakeAccumulator = Callable[[Signal], Accumulator]
Ints32 = npt.NDArray[np.int32]

# Slack of a new segment, in tokens: MIN_SLACK and one for every SLACK_SHARE tokens of the request.
MIN_SLACK = 64
SLACK_SHARE = 8
MAX_SLOT = (1 << 31) - 1

# Why a kernel stopped at a request: `fault` is (reason, number in the plan, number in the mirror).
(
    FULL,
    SHAPE,
    COUNT,
    LIVE_COUNT,
    DEAD_EVICTED,
    DEAD_MOVED,
    NO_SLOT,
    NO_BLOCK,
    FEWER,
    LIVE_RESTORED,
) = range(1, 11)
REASONS = {
    SHAPE: "the plan's columns do not fit: {} numbers, {} referenced",
    COUNT: "the plan is for {} tokens, the mirror has {}",
    LIVE_COUNT: "the plan counts {} live tokens, the mirror has {}",
    DEAD_EVICTED: "the plan evicts token {}, which is not live in the mirror of {} tokens",
    DEAD_MOVED: "the plan moves token {}, which is not live in the mirror of {} tokens",
    LIVE_RESTORED: "the plan restores token {}, which is not dead in the mirror of {} tokens",
    NO_SLOT: "the plan writes to {}, which is no slot, in a mirror of {} tokens",
    NO_BLOCK: "the plan is for {} tokens, the block table has room for {}",
    FEWER: "{} tokens were rejected, the mirror has {}",
}


class BlockTables(NamedTuple):
    """n block tables; table i is `blocks[bases[i] : bases[i] + counts[i]]`. int32; int64 [n]."""

    blocks: Ints32
    bases: Ints
    counts: Ints

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> BlockTables:
        arrays = [np.asarray(table, dtype=np.int32) for table in tables]
        counts = np.array([len(array) for array in arrays], dtype=np.int64)
        return cls(np.concatenate(arrays), np.cumsum(counts) - counts, counts)


class MirrorArrays(NamedTuple):
    """The arrays of `MirrorColumns`, for kernels; `facts`: one record per row."""

    facts: Any
    slots: Ints32


class MirrorColumns(Rows):
    """The columns of the token tables that a worker needs: counts, and the slot of each token."""

    num_tokens: Ints  # dead ones included
    num_live: Ints
    first_token: Ints
    token_capacity: Ints
    version: Ints

    def __init__(self) -> None:
        self._tokens = Arena(Column(np.int32, fill=-1))
        super().__init__()

    @property
    def slots(self) -> Ints32:
        return self._tokens.arrays[0]

    @property
    def arrays(self) -> MirrorArrays:
        return MirrorArrays(self.records, self.slots)

    def reserve(self, row: int, num_tokens: int) -> None:
        """Allocate a segment for `num_tokens` tokens of `row`, plus slack."""
        wanted = num_tokens + num_tokens // SLACK_SHARE + MIN_SLACK
        used = int(self.num_tokens[row])
        self._tokens.reserve(self.first_token, self.token_capacity, row, used, wanted)

    def give_back(self, row: int) -> None:
        """Let the row be reused, with another version."""
        version = self.version[row] + 1
        super().give_back(row)
        self.version[row] = version

    def shrink(self) -> None:
        """Release memory, if most of it is unused."""
        if 4 * int(self.token_capacity.sum()) < self._tokens.size:
            self._tokens.compact(self.first_token, self.token_capacity, 0, shrink=True)


class Mirror:
    """The mirror of one request: row `row` of `mirrors`. `accumulators`: its attention signals.

    `seen`: the keys that were seen for its signals of keys. The mirror of a request is dropped only
    before its first eviction, while all its tokens are live, so they lose nothing by it.
    """

    __slots__ = ("_kept", "accumulators", "mirrors", "row", "seen")

    def __init__(self, mirrors: Mirrors, row: int) -> None:
        self.mirrors = mirrors
        self.row = row
        self.accumulators: dict[Signal, Accumulator] = {}
        self.seen: defaultdict[Signal, SeenKeys] = defaultdict(SeenKeys)
        self._kept: Sequence[Signal] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, dead ones included."""
        return int(self.mirrors.columns.num_tokens[self.row])

    def live(self) -> tuple[Ints, Ints]:
        """Ids [n] of the live tokens, ascending, and their slots [n]."""
        ids, slots = self.mirrors.live(np.array([self.row], dtype=np.int64))
        return ids.values, slots.values

    def keep(self, signals: Sequence[Signal], make: MakeAccumulator = Accumulator) -> None:
        """Set the kept `signals`: those already kept continue, others start from zero."""
        if signals == self._kept:
            return
        self._kept = signals
        before, self.accumulators = self.accumulators, {}
        for signal in signals:
            if not signal.of_keys:
                self.accumulators[signal] = before.get(signal) or make(signal)


class Mirrors(Mapping[str, Mirror]):
    """The mirrors of one worker by request id.

    The arrays of `columns` are replaced when they grow: read them anew.
    """

    def __init__(self) -> None:
        self.columns = MirrorColumns()
        self._rows: dict[str, int] = {}
        self._views: dict[str, Mirror] = {}
        self._fault: Ints = np.zeros(3, dtype=np.int64)
        self._counts: Ints32 = np.zeros(0, dtype=np.int32)  # live tokens by block; 0 between calls

    # ------------------------------------------------------------ requests come and go

    def __getitem__(self, name: str) -> Mirror:
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, names: Sequence[str]) -> Ints:
        """The rows [n] of `names`; raises KeyError for one without a mirror."""
        return np.fromiter(map(self._rows.__getitem__, names), np.int64, len(names))

    def drop(self, names: Iterable[str]) -> None:
        """Remove the mirrors of these requests; unknown names are ignored."""
        for name in names:
            row = self._rows.pop(name, None)
            if row is None:
                continue
            del self._views[name]
            self.columns.give_back(row)
        self.columns.shrink()

    def clear(self) -> None:
        """Remove all mirrors."""
        self.drop([*self._rows])

    def _take_row(self, name: str, num_tokens: int) -> int:
        """Allocate a row for the new request `name`, with capacity for `num_tokens`."""
        row = self.columns.take()
        self._rows[name] = row
        self._views[name] = Mirror(self, row)
        self.columns.reserve(row, num_tokens)
        return row

    # ------------------------------------------------------------ a step

    def place(
        self,
        names: Sequence[str],
        num_tokens: Ints,
        block_size: int,
        tables: BlockTables,
    ) -> None:
        """Extend requests that have evicted nothing to `num_tokens` [n] tokens; add new ones.

        Their layout is vLLM's: token t is in logical block t // S, at offset t % S. Raises
        MirrorMismatchError when `tables` has too few blocks.
        """
        for name, count in zip(names, num_tokens.tolist(), strict=True):
            if name not in self._rows:
                self._take_row(name, count)
        self._change(_place, names, num_tokens, block_size, tables)

    def start_dead(self, names: Sequence[str], num_tokens: Ints) -> None:
        """Add the mirrors of requests that have `num_tokens` [n] tokens, all of them dead."""
        for name, count in zip(names, num_tokens.tolist(), strict=True):
            row = self._take_row(name, count)
            self.columns.num_tokens[row] = count

    def apply(self, steps: RequestSteps) -> Ints:
        """Apply evictions, moves, restores and new tokens; returns the rows [R] of the requests.

        Raises MirrorMismatchError when the plan and a mirror disagree; mirrors may then be partly
        updated.
        """
        columns = steps.num_tokens, steps.num_live, steps.evicted
        moves = steps.moved_ids, steps.moved_slots, steps.restored_ids, steps.restored_slots
        return self._change(_apply, steps.names, *columns, *moves, steps.new_slots)

    def truncate(self, rejected: Mapping[str, int]) -> None:
        """Take back the newest tokens of requests, by name how many: drafts that were rejected.

        Requests without a mirror are skipped. Raises MirrorMismatchError for more tokens than there
        are; mirrors before that one are then truncated.
        """
        names = [name for name in rejected if name in self._rows]
        counts = np.array([rejected[name] for name in names], dtype=np.int64)
        self._change(_truncate, names, counts)

    def _change(self, change: Callable[..., int], names: Sequence[str], *arguments: Any) -> Ints:
        """Run the kernel `change` over the rows [n] of `names`, which it returns; a row that is
        full grows. Raises MirrorMismatchError for another fault.
        """
        rows, done = self.rows_of(names), 0
        while done < len(rows):
            done = change(done, rows, self.columns.arrays, *arguments, self._fault)
            reason, wanted, known = self._fault.tolist()
            if done < len(rows) and reason != FULL:
                why = REASONS[reason].format(wanted, known)
                raise MirrorMismatchError(f"{names[done]}: {why}")
            if done < len(rows):
                self.columns.reserve(int(rows[done]), wanted)
        return rows

    # ------------------------------------------------------------ queries

    def live(self, rows: Ints) -> tuple[Ragged, Ragged]:
        """Ids of the live tokens of `rows` [n], ascending, and their slots."""
        starts = starts_of(self.columns.num_live[rows])
        out = np.empty((2, starts[-1]), dtype=np.int64)
        _live(rows, self.columns.arrays, starts, out)
        return Ragged(out[0], starts), Ragged(out[1], starts)

    def split(self, rows: Ints, block_size: int) -> tuple[Ragged, Ragged]:
        """What attention reads of `rows` [n]: blocks full of live tokens, and the slots of the
        live tokens in partial blocks, the newest last.
        """
        num_live = self.columns.num_live[rows]
        most = int(num_live.sum())
        full, partial = (np.empty(size, dtype=np.int64) for size in (most // block_size, most))
        starts = np.zeros((2, len(rows) + 1), dtype=np.int64)
        runs = np.empty((2, int(num_live.max(initial=0))), dtype=np.int64)
        while True:
            missing = _split(
                rows,
                self.columns.arrays,
                block_size,
                self._counts,
                runs,
                starts,
                full,
                partial,
            )
            if not missing:
                break
            self._counts = np.zeros(missing + missing // 2, dtype=np.int32)
        full, partial = full[: starts[0, -1]], partial[: starts[1, -1]]
        return Ragged(full, starts[0]), Ragged(partial, starts[1])


# ---------------------------------------------------------------- kernels


@kernel
def _place(
    first: int,
    rows: Ints,
    columns: MirrorArrays,
    num_tokens: Ints,
    block_size: int,
    tables: BlockTables,
    fault: Ints,
) -> int:
    """Append up to `num_tokens` to `rows[first:]`: slots[o + t] = S * blocks[base + t // S] + t % S

    Returns the index of the first request that could not be placed, len(rows) if there is none.
    """
    for i in range(first, len(rows)):
        fact, table, size = columns.facts[rows[i]], tables.bases[i], tables.counts[i]
        base, token, end = fact.first_token, fact.num_tokens, num_tokens[i]
        fault[1] = end
        if token > end:
            fault[0], fault[2] = COUNT, token
            return i
        if end > size * block_size or table < 0 or table + size > len(tables.blocks):
            fault[0], fault[2] = NO_BLOCK, size * block_size
            return i
        if end > fact.token_capacity:
            fault[0] = FULL
            return i
        fact.num_live += end - token
        fact.num_tokens = end
        while token < end:
            rank = token // block_size
            stop = min(end, (rank + 1) * block_size)
            slot = np.int64(tables.blocks[table + rank]) * block_size + token - rank * block_size
            for t in range(token, stop):
                columns.slots[base + t] = slot
                slot += 1
            token = stop
    return len(rows)


@kernel
def _apply(
    first: int,
    rows: Ints,
    columns: MirrorArrays,
    num_tokens: Ints,
    num_live: Ints,
    evicted: Ragged,
    moved_ids: Ragged,
    moved_slots: Ragged,
    restored_ids: Ragged,
    restored_slots: Ragged,
    new_slots: Ragged,
    fault: Ints,
) -> int:
    """Apply the steps of `rows[first:]`. For each row, with o = first_token and T = tokens before:

    slots[o + t] = -1 for evicted t, moved_slots[j] for moved_ids[j], new_slots[j] for t = T + j,
                   restored_slots[j] for restored_ids[j]
    tokens = T + |new|,  live = live - |evicted| + |restored| + |new|
    version + 1 if a token died, moved or came back

    Checks that every id is < T, and live or, of a restored one, dead, and that every slot is
    valid, so no plan can write outside a row's segment. Returns the index of the first request that
    could not be applied, with the reason in `fault`; with reason `FULL` that request is unchanged.
    """
    size = len(rows)
    fault[0], fault[1] = SHAPE, size
    for found in (
        len(num_tokens) + 1,
        len(num_live) + 1,
        len(moved_ids.starts),
        len(restored_ids.starts),
        len(new_slots.starts),
    ):
        if found != size + 1:
            fault[2] = found - 1
            return first
    if len(evicted.starts) != size + 1 or len(moved_slots.values) != len(moved_ids.values):
        fault[1], fault[2] = len(moved_slots.values), len(moved_ids.values)
        return first
    if len(restored_slots.values) != len(restored_ids.values):
        fault[1], fault[2] = len(restored_slots.values), len(restored_ids.values)
        return first
    for i in range(first, size):
        fact = columns.facts[rows[i]]
        base, before, live = fact.first_token, fact.num_tokens, fact.num_live
        e0, e1 = evicted.starts[i], evicted.starts[i + 1]
        m0, m1 = moved_ids.starts[i], moved_ids.starts[i + 1]
        r0, r1 = restored_ids.starts[i], restored_ids.starts[i + 1]
        n0, n1 = new_slots.starts[i], new_slots.starts[i + 1]
        fault[0] = SHAPE
        if not 0 <= e0 <= e1 <= len(evicted.values):
            fault[1], fault[2] = len(evicted.values), e1
            return i
        if not 0 <= m0 <= m1 <= len(moved_ids.values):
            fault[1], fault[2] = len(moved_ids.values), m1
            return i
        if not 0 <= r0 <= r1 <= len(restored_ids.values):
            fault[1], fault[2] = len(restored_ids.values), r1
            return i
        if not 0 <= n0 <= n1 <= len(new_slots.values):
            fault[1], fault[2] = len(new_slots.values), n1
            return i
        fault[2] = before
        if num_tokens[i] != before:
            fault[0], fault[1] = COUNT, num_tokens[i]
            return i
        if before + n1 - n0 > fact.token_capacity:
            fault[0], fault[1] = FULL, before + n1 - n0
            return i
        if e1 > e0 or m1 > m0 or r1 > r0:
            fact.version += 1
        for j in range(e0, e1):
            token = evicted.values[j]
            if token < 0 or token >= before or columns.slots[base + token] < 0:
                fault[0], fault[1] = DEAD_EVICTED, token
                return i
            columns.slots[base + token] = -1
        for j in range(m0, m1):
            token, slot = moved_ids.values[j], moved_slots.values[j]
            if token < 0 or token >= before or columns.slots[base + token] < 0:
                fault[0], fault[1] = DEAD_MOVED, token
                return i
            if slot < 0 or slot > MAX_SLOT:
                fault[0], fault[1] = NO_SLOT, slot
                return i
            columns.slots[base + token] = slot
        for j in range(r0, r1):
            token, slot = restored_ids.values[j], restored_slots.values[j]
            if token < 0 or token >= before or columns.slots[base + token] >= 0:
                fault[0], fault[1] = LIVE_RESTORED, token
                return i
            if slot < 0 or slot > MAX_SLOT:
                fault[0], fault[1] = NO_SLOT, slot
                return i
            columns.slots[base + token] = slot
        for j in range(n0, n1):
            slot = new_slots.values[j]
            if slot < 0 or slot > MAX_SLOT:
                fault[0], fault[1] = NO_SLOT, slot
                return i
            columns.slots[base + before + j - n0] = slot
        live += n1 - n0 + r1 - r0 - (e1 - e0)
        fact.num_tokens, fact.num_live = before + n1 - n0, live
        if live != num_live[i]:
            fault[0], fault[1], fault[2] = LIVE_COUNT, num_live[i], live
            return i
    return size


@kernel
def _truncate(first: int, rows: Ints, columns: MirrorArrays, counts: Ints, fault: Ints) -> int:
    """Take back the newest `counts` tokens of `rows[first:]`. Returns the index of the first
    request that has fewer, len(rows) if there is none.
    """
    for i in range(first, len(rows)):
        fact = columns.facts[rows[i]]
        end = fact.num_tokens
        if counts[i] < 0 or counts[i] > end:
            fault[0], fault[1], fault[2] = FEWER, counts[i], end
            return i
        for at in range(fact.first_token + end - counts[i], fact.first_token + end):
            fact.num_live -= columns.slots[at] >= 0
            columns.slots[at] = -1
        fact.num_tokens = end - counts[i]
        fact.version += counts[i] > 0
    return len(rows)


@kernel
def _live(rows: Ints, columns: MirrorArrays, starts: Ints, out: Ints) -> None:
    """out[:, starts[i]:starts[i + 1]] = ids and slots of row rows[i]'s live tokens, by id."""
    for i in range(len(rows)):
        fact, at, end = columns.facts[rows[i]], starts[i], starts[i + 1]
        for token in range(fact.num_tokens):
            slot = columns.slots[fact.first_token + token]
            if slot >= 0 and at < end:
                out[0, at], out[1, at] = token, slot
                at += 1


@kernel
def _split(
    rows: Ints,
    columns: MirrorArrays,
    block_size: int,
    counts: Ints32,
    runs: Ints,
    starts: Ints,
    full: Ints,
    partial: Ints,
) -> int:
    """For each row, with n(b) its live tokens in block b of S slots:

    full = {b: n(b) = S} by the first token in each,  partial = slots in blocks with 0 < n(b) < S
    S * |full| + |partial| = live

    Scans runs of consecutive live tokens in one block: `runs[:, k]` is the index in `slots`
    where run k begins, and its block. `counts` is 0 before and after. Returns 0, or the length that
    `counts` requires.
    """
    num_full = num_partial = 0
    for i in range(len(rows)):
        base = columns.facts[rows[i]].first_token
        end = base + columns.facts[rows[i]].num_tokens
        low, high, length, num_runs, missing = 0, 0, 0, 0, 0
        for at in range(base, end):
            slot = int(columns.slots[at])
            if slot < low or slot >= high:
                if slot < 0:
                    continue
                if length:
                    counts[runs[1, num_runs - 1]] += length
                    length = 0
                block = slot // block_size
                if block >= len(counts):
                    missing = max(missing, block + 1)
                    low = high = 0
                    continue
                low = block * block_size
                high = low + block_size
                runs[0, num_runs], runs[1, num_runs] = at, block
                num_runs += 1
            length += 1
        if length:
            counts[runs[1, num_runs - 1]] += length
        for k in range(num_runs):
            block = runs[1, k]
            if missing or counts[block] < 0:
                continue
            if counts[block] == block_size:
                full[num_full] = block
                num_full += 1
                counts[block] = -1
                continue
            stop = runs[0, k + 1] if k + 1 < num_runs else end
            for at in range(runs[0, k], stop):
                if columns.slots[at] >= 0:
                    partial[num_partial] = columns.slots[at]
                    num_partial += 1
        for k in range(num_runs):
            counts[runs[1, k]] = 0
        if missing:
            return missing
        starts[0, i + 1], starts[1, i + 1] = num_full, num_partial
    return 0
