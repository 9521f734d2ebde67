"""Token tables and pool liveness against plain dictionaries, in pools of 4 to 8 blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.core.tables import evict_tokens, hole_of, sync_new_tokens
from vtoken.base.errors import InvariantViolation, UnsupportedError
from vtoken.control.status import naive_blocks
from vtoken.core.tables.kernels import MAX_HOLDERS
from vtoken.core.tables.pool import MAX_BLOCK_SIZE
from vtoken.core.tables.token_tables import TokenTables

PICK = st.randoms(use_true_random=False)


@dataclass
class Shadow:
    """One request: live token -> slot, and token -> host slot of its copy."""

    blocks: list[int] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    num_restored: int = 0
    num_tokens: int = 0
    evicted: bool = False


class Tables(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 8), block_size=st.integers(2, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.tables = TokenTables(num_blocks, block_size)
        self.shadows: dict[str, Shadow] = {}
        self.num_blocks = num_blocks
        self.count = self.num_copies = 0

    def free(self) -> list[int]:
        held = {b for shadow in self.shadows.values() for b in shadow.blocks}
        return [b for b in range(1, self.num_blocks) if b not in held]

    def holders(self, block: int) -> int:
        return sum(block in shadow.blocks for shadow in self.shadows.values())

    def private(self, shadow: Shadow) -> list[int]:
        return [b for b in shadow.blocks if self.holders(b) == 1]

    def extent(self, shadow: Shadow) -> int:
        """1 + the highest index with a live token."""
        return max((self.index(shadow, slot) + 1 for slot in shadow.slots.values()), default=0)

    def index(self, shadow: Shadow, slot: int) -> int:
        return shadow.blocks.index(slot // self.size) * self.size + slot % self.size

    def slot(self, shadow: Shadow, index: int) -> int:
        return shadow.blocks[index // self.size] * self.size + index % self.size

    def append(self, name: str, num_new: int) -> bool:
        """Append to a request; False when the pool has too few blocks."""
        shadow = self.shadows[name]
        start = self.extent(shadow)
        missing = -(-(start + num_new) // self.size) - len(shadow.blocks)
        if missing > len(self.free()):
            return False
        shadow.blocks += self.free()[: max(0, missing)]
        new = [self.slot(shadow, start + i) for i in range(num_new)]
        total = shadow.num_tokens + num_new
        slots = sync_new_tokens(self.tables, name, list(shadow.blocks), total)
        assert slots.tolist() == new
        shadow.slots |= zip(range(shadow.num_tokens, total), new, strict=True)
        shadow.num_tokens = total
        return True

    @rule(num_tokens=st.integers(1, 9), pick=PICK, shares=st.booleans())
    def admit(self, num_tokens: int, pick: object, shares: bool) -> None:
        """A new request, on the full blocks of another one's prefix or on its own."""
        name = f"r{self.count}"
        donors = [s for s in self.shadows.values() if not s.evicted and s.num_tokens >= self.size]
        prefix: list[int] = []
        if shares and donors:
            donor = pick.choice(donors)  # type: ignore[attr-defined]
            prefix = donor.blocks[: pick.randint(1, donor.num_tokens // self.size)]  # type: ignore[attr-defined]
        total = len(prefix) * self.size + num_tokens
        missing = -(-total // self.size) - len(prefix)
        if missing > len(self.free()):
            return
        self.count += 1
        blocks = prefix + self.free()[:missing]
        sync_new_tokens(self.tables, name, blocks, total)
        shadow = self.shadows[name] = Shadow(blocks, num_tokens=total)
        shadow.slots = {t: self.slot(shadow, t) for t in range(total)}

    @precondition(lambda self: self.shadows)
    @rule(num_new=st.integers(1, 5), pick=PICK)
    def grow(self, num_new: int, pick: object) -> None:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        self.append(name, num_new)

    @precondition(lambda self: self.shadows)
    @rule(num_new=st.integers(1, 5), share=st.floats(0, 1), pick=PICK)
    def take_back(self, num_new: int, share: float, pick: object) -> None:
        """The newest tokens go, some of them older than the last growth."""
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        self.append(name, num_new)
        shadow = self.shadows[name]
        total = shadow.num_tokens - min(shadow.num_tokens, round(share * (num_new + 2)))
        rows = np.array([self.tables[name].row])
        self.drop(name, [t for t in shadow.copies if t >= total])
        self.tables.truncate(rows, np.array([total]))
        shadow.num_tokens = total
        shadow.slots = {t: slot for t, slot in shadow.slots.items() if t < total}

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, beyond=st.booleans())
    def refuse_to_take_back(self, pick: object, beyond: bool) -> None:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        total = self.shadows[name].num_tokens + 1 if beyond else -1
        names = [*self.shadows, name] if beyond else [name]
        rows = np.array([self.tables[each].row for each in names])
        totals = np.array([0] * (len(names) - 1) + [total])
        with pytest.raises(InvariantViolation, match=f"{name} is to have {total} tokens"):
            self.tables.truncate(rows, totals)

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK)
    def recycle(self, pick: object) -> None:
        """One new token goes into a hole, the lowest private one."""
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        shadow, table = self.shadows[name], self.tables[name]
        private = self.private(shadow)
        taken = set(shadow.slots.values())
        holes = [
            i
            for i in range(self.extent(shadow))
            if self.slot(shadow, i) not in taken and self.slot(shadow, i) // self.size in private
        ]
        table.protect(set(shadow.blocks) - set(private))
        self.tables.choose_places(recycling=True)
        hole = hole_of(self.tables, name)
        table.protect(())
        for other in self.tables:
            if other is not table:
                self.tables.columns.hole[other.row] = -1
        assert hole == (holes[0] if holes else -1)
        if hole < 0:
            return
        total = shadow.num_tokens + 1
        slots = sync_new_tokens(self.tables, name, list(shadow.blocks), total)
        shadow.slots[shadow.num_tokens] = self.slot(shadow, hole)
        assert slots.tolist() == [self.slot(shadow, hole)]
        shadow.num_tokens = total

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, share=st.floats(0, 1), single=st.booleans(), parks=st.booleans())
    def evict(self, pick: object, share: float, single: bool, parks: bool) -> None:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        self.evict_some(name, pick, share, single=single, parks=parks)

    def evict_some(
        self, name: str, pick: object, share: float, *, single: bool, parks: bool
    ) -> None:
        shadow = self.shadows[name]
        live = sorted(shadow.slots)
        if not live:
            return
        victims = pick.sample(live, 1 if single else int(share * len(live)))  # type: ignore[attr-defined]
        if single:
            evict_tokens(self.tables, name, [victims[0]])
        else:
            evict_tokens(self.tables, name, np.array(victims, dtype=np.int64))
        for victim in victims:
            del shadow.slots[victim]
        shadow.evicted |= bool(victims)
        if parks:
            self.park(name, sorted(set(victims) - set(shadow.copies)))

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, kind=st.sampled_from(["unknown", "negative", "doubled", "dead"]))
    def refuse_eviction(self, pick: object, kind: str) -> None:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        shadow = self.shadows[name]
        dead = sorted(set(range(shadow.num_tokens)) - set(shadow.slots))
        live = sorted(shadow.slots)
        bad = {
            "unknown": [shadow.num_tokens],
            "negative": [-1],
            "doubled": live[:1] * 2,
            "dead": dead[:1],
        }[kind]
        if bad:
            with pytest.raises(InvariantViolation):
                evict_tokens(self.tables, name, np.array(live[1:] + bad, dtype=np.int64))

    def park(self, name: str, ids: list[int]) -> None:
        """Dead tokens without a copy get one."""
        hosts = range(self.num_copies, self.num_copies + len(ids))
        self.num_copies += len(ids)
        row = self.tables[name].row
        self.tables.note_copies(row, np.array(ids, dtype=np.int64), np.array(hosts))
        self.shadows[name].copies |= zip(ids, hosts, strict=True)

    def drop(self, name: str, ids: list[int]) -> None:
        shadow = self.shadows[name]
        rows = np.full(len(ids), self.tables[name].row)
        num_parked = self.tables.drop_copies(rows, np.array(ids, dtype=np.int64))
        assert num_parked == len(set(ids) - set(shadow.slots))
        for token in ids:
            del shadow.copies[token]

    @precondition(lambda self: any(s.copies for s in self.shadows.values()))
    @rule(pick=PICK, share=st.floats(0, 1))
    def drop_copies(self, pick: object, share: float) -> None:
        """Of live tokens and of dead ones."""
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        ids = sorted(self.shadows[name].copies)
        self.drop(name, pick.sample(ids, round(share * len(ids))))  # type: ignore[attr-defined]

    def open_places(self, shadow: Shadow) -> list[int]:
        """Places in private blocks that hold no live token."""
        taken, private = set(shadow.slots.values()), self.private(shadow)
        return [
            i
            for i in range(len(shadow.blocks) * self.size)
            if self.slot(shadow, i) not in taken and shadow.blocks[i // self.size] in private
        ]

    def request_with_parked_tokens(self, pick: object) -> str:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        if self.shadows[name].copies.keys() <= self.shadows[name].slots.keys():
            self.evict_some(name, pick, pick.random(), single=False, parks=True)  # type: ignore[attr-defined]
        return str(name)

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, share=st.floats(0, 1), num_fresh=st.integers(0, 2), most=st.booleans())
    def restore(self, pick: object, share: float, num_fresh: int, most: bool) -> None:
        """Parked tokens go into places of private blocks and of fresh ones, in any order."""
        name = self.request_with_parked_tokens(pick)
        shadow, table = self.shadows[name], self.tables[name]
        table.protect(set(shadow.blocks) - set(self.private(shadow)))
        places = self.open_places(shadow)
        for limit in (1, len(places) + 1):
            assert self.tables.open_places(table.row, limit).tolist() == places[:limit]
        parked = sorted(set(shadow.copies) - set(shadow.slots))
        assert table.parked_ids().tolist() == parked
        fresh = self.free()[:num_fresh]
        places += range(
            len(shadow.blocks) * self.size, (len(shadow.blocks) + len(fresh)) * self.size
        )
        count = min(len(parked), len(places)) if most else round(share * len(parked))
        if count == 0 or count > len(places):
            table.protect(())
            return
        ids = sorted(pick.sample(parked, count))  # type: ignore[attr-defined]
        chosen = sorted(pick.sample(places, count))  # type: ignore[attr-defined]
        slots = self.tables.restore(
            table.row, np.array(ids), np.array(chosen), np.array(fresh, dtype=np.int64)
        )
        table.protect(())
        shadow.blocks += fresh
        assert slots.tolist() == [self.slot(shadow, place) for place in chosen]
        shadow.slots |= zip(ids, slots.tolist(), strict=True)
        shadow.num_restored += count

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK)
    def refuse_to_restore(self, pick: object) -> None:
        name = self.request_with_parked_tokens(pick)
        shadow, table = self.shadows[name], self.tables[name]
        live, places = sorted(shadow.slots), self.open_places(shadow)
        parked = sorted(set(shadow.copies) - set(live))
        lost = sorted(set(range(shadow.num_tokens)) - set(live) - set(parked))
        private = self.private(shadow)
        shared = [i * self.size for i, b in enumerate(shadow.blocks) if b not in private]
        taken = [self.index(shadow, shadow.slots[token]) for token in live]
        table.protect(set(shadow.blocks) - set(private))
        for ids, at in (
            (live, places),
            (lost, places),
            ([shadow.num_tokens], places),
            ([-1], places),
            (parked, taken),
            (parked, [len(shadow.blocks) * self.size]),
            (parked, shared),
        ):
            if ids and at:
                self.refuse(table.row, ids[:1], at[:1])
        if parked and len(places) > 1:
            self.refuse(table.row, parked[:1] * 2, places[:2])
        if len(parked) > 1 and places:
            self.refuse(table.row, parked[:2], places[:1] * 2)
        table.protect(())

    def refuse(self, row: int, ids: list[int], places: list[int]) -> None:
        with pytest.raises(InvariantViolation):
            self.tables.restore(row, np.array(ids), np.array(places), np.empty(0, dtype=np.int64))

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, num_fresh=st.integers(0, 2), shuffle=st.booleans())
    def move(self, pick: object, num_fresh: int, shuffle: bool) -> None:
        """Empty some private blocks into free places of the others and of fresh blocks."""
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        shadow = self.shadows[name]
        private = self.private(shadow)
        dropped = pick.sample(private, pick.randint(0, len(private)))  # type: ignore[attr-defined]
        fresh = self.free()[:num_fresh]
        blocks = [b for b in shadow.blocks if b not in dropped] + fresh
        if shuffle:
            pick.shuffle(blocks)  # type: ignore[attr-defined]
        movers = [t for t, slot in shadow.slots.items() if slot // self.size in dropped]
        taken = set(shadow.slots.values())
        places = [
            b * self.size + o
            for b in blocks
            if b in fresh or b in private
            for o in range(self.size)
            if b * self.size + o not in taken
        ]
        if len(places) < len(movers):
            return
        targets = pick.sample(places, len(movers))  # type: ignore[attr-defined]
        expected = [b for b in shadow.blocks if b in dropped]
        got = self.tables.apply_moves(
            name, np.array(movers, dtype=np.int64), np.array(targets, dtype=np.int64), blocks
        )
        assert got == expected
        shadow.slots |= zip(movers, targets, strict=True)
        shadow.blocks = blocks
        shadow.evicted = True

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, all_of_them=st.booleans())
    def drop_dead_blocks(self, pick: object, all_of_them: bool) -> None:
        """Blocks without a live token leave, those behind them move up."""
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        shadow, table = self.shadows[name], self.tables[name]
        dead = table.block_live() == 0
        if not all_of_them:
            dead &= np.array([pick.random() < 0.5 for _ in shadow.blocks], dtype=np.bool_)  # type: ignore[attr-defined]
        expected = [b for b, leaves in zip(shadow.blocks, dead, strict=True) if leaves]
        assert self.tables.drop_blocks(table, dead) == expected
        shadow.blocks = [b for b in shadow.blocks if b not in expected]
        live = table.block_live() > 0
        if live.any():
            with pytest.raises(InvariantViolation, match="I1"):
                self.tables.drop_blocks(table, live)

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK, kind=st.sampled_from(["lost", "outside", "occupied", "doubled", "dead"]))
    def refuse_moves(self, pick: object, kind: str) -> None:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        shadow = self.shadows[name]
        live = sorted(shadow.slots)
        if len(live) < 2:
            return
        token, other = live[0], live[1]
        dead = sorted(set(range(shadow.num_tokens)) - set(live))
        tokens, slots, blocks = {
            "lost": ([], [], [b for b in shadow.blocks if b != shadow.slots[token] // self.size]),
            "outside": ([token], [0], shadow.blocks),
            "occupied": ([token], [shadow.slots[other]], shadow.blocks),
            "doubled": ([token, token], [shadow.slots[token]] * 2, shadow.blocks),
            "dead": (dead[:1] or [shadow.num_tokens], [shadow.slots[token]], shadow.blocks),
        }[kind]
        with pytest.raises(InvariantViolation):
            self.tables.apply_moves(
                name, np.array(tokens, dtype=np.int64), np.array(slots, dtype=np.int64), blocks
            )

    @precondition(lambda self: self.shadows)
    @rule(pick=PICK)
    def release(self, pick: object) -> None:
        name = pick.choice(sorted(self.shadows))  # type: ignore[attr-defined]
        del self.shadows[name]
        self.tables.release(name)
        assert name not in self.tables

    @rule()
    def name_the_owners(self) -> None:
        """Compare owners with the newest holders, not after every change."""
        if not hasattr(self, "tables"):
            return
        newest = [0] * self.num_blocks
        for name, shadow in self.shadows.items():
            for block in shadow.blocks:
                newest[block] = self.tables[name].number
        assert self.tables.owners().tolist() == newest
        numbers = [table.number for table in self.tables]
        assert len(set(numbers)) == len(numbers)
        assert all(1 <= number <= self.count for number in numbers)

    @invariant()
    def tables_equal_the_shadow(self) -> None:
        if not hasattr(self, "tables"):
            return
        self.tables.check()
        assert {t.request_id for t in self.tables} == set(self.shadows)
        rows = self.tables.rows_of(["nobody", *self.shadows]).tolist()
        assert rows == [self.tables[name].row for name in self.shadows]
        for name, shadow in self.shadows.items():
            table = self.tables[name]
            ids = table.live_ids()
            slots = table.slots_of(ids).tolist()
            assert dict(zip(ids.tolist(), slots, strict=True)) == shadow.slots
            assert (table.blocks, table.num_tokens) == (shadow.blocks, shadow.num_tokens)
            assert table.extent == self.extent(shadow)
            assert table.num_dead == shadow.num_tokens - len(shadow.slots)
            hosts = {t: h for t, h in enumerate(table.hosts_of().tolist()) if h >= 0}
            assert hosts == shadow.copies
            assert table.num_parked == len(set(hosts) - set(shadow.slots))
            assert table.live_changes == table.num_dead + 2 * shadow.num_restored
            assert all(table.is_live(t) == (t in shadow.slots) for t in range(shadow.num_tokens))
            per_block = [
                sum(slot // self.size == b for slot in shadow.slots.values()) for b in shadow.blocks
            ]
            assert table.block_live().tolist() == per_block
            grid = table.grid()
            assert grid[grid >= 0].size == len(shadow.slots)
            written = table.written_ids()
            assert (written[grid >= 0] == grid[grid >= 0]).all()
            naive = {t // self.size for t in shadow.slots} if table.virtual else shadow.blocks
            facts = self.tables.columns.facts[[table.row]]
            assert naive_blocks(facts).tolist() == [len(naive)]

    @invariant()
    def pool_equals_the_shadow(self) -> None:
        if not hasattr(self, "tables"):
            return
        pool = self.tables.pool
        live = {slot for shadow in self.shadows.values() for slot in shadow.slots.values()}
        used = {b for shadow in self.shadows.values() for b in shadow.blocks}
        for block in range(self.num_blocks):
            assert pool.live[block] == sum(slot // self.size == block for slot in live)
            assert pool.holders[block] == self.holders(block)
        waste = 1 - len(live) / (len(used) * self.size) if used else 0.0
        assert pool.fragmentation == pytest.approx(waste)
        counts = [int(pool.live[b]) for b in used]
        assert pool.num_partially_live() == sum(0 < n < self.size for n in counts)
        assert pool.num_low_utilization() == sum(2 * n <= self.size for n in counts)
        assert pool.num_shared == sum(self.holders(b) > 1 for b in used)
        rows = self.tables.all_rows
        blocks = [shadow.blocks for shadow in self.shadows.values()]
        private = [sum(self.holders(b) == 1 for b in held) for held in blocks]
        assert self.tables.num_private_blocks(rows).tolist() == private

    @invariant()
    def growth_is_what_the_places_of_the_next_tokens_need(self) -> None:
        if not hasattr(self, "tables"):
            return
        rows, held = self.tables.all_rows, self.tables.columns.num_blocks
        before = self.tables.columns.hole.copy()  # a query chooses no place
        for recycling in (False, True):
            grown = {
                n: self.tables.growth(rows, np.full_like(rows, n), recycling=recycling)
                for n in (1, 5)
            }
            assert (self.tables.columns.hole == before).all()
            extents = self.tables.choose_places(recycling=recycling).next_extent
            self.tables.columns.hole[:] = before
            for num_new, blocks in grown.items():
                needed = [-(-(extents[row] + num_new - 1) // self.size) for row in rows.tolist()]
                assert blocks.tolist() == np.maximum(0, needed - held[rows]).tolist()


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTables = Tables.TestCase


# ---------------------------------------------------------------- the ends of the columns' types


def test_the_largest_block_is_counted_and_a_larger_one_is_refused() -> None:
    tables = TokenTables(3, MAX_BLOCK_SIZE)
    sync_new_tokens(tables, "a", [1], MAX_BLOCK_SIZE)
    assert tables.pool.live.tolist() == [0, 65_535, 0]
    tables.check()
    with pytest.raises(UnsupportedError, match=r"65,536 slots: at most 65,535; set --block-size"):
        TokenTables(3, MAX_BLOCK_SIZE + 1)


def test_more_slots_than_a_column_can_name_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"at most 2,147,483,647 slots in all"):
        TokenTables(1 << 21, 1 << 10)


def test_one_holder_too_many_is_refused_before_the_count_wraps() -> None:
    tables = TokenTables(4, 2)
    sync_new_tokens(tables, "a", [1], 2)
    tables.pool.holders[1] = MAX_HOLDERS - 1
    sync_new_tokens(tables, "b", [1], 2)
    with pytest.raises(InvariantViolation, match=r"c is holder 65,536 of block 1: too many"):
        sync_new_tokens(tables, "c", [1], 2)
    assert tables.pool.holders[1] == MAX_HOLDERS
    assert tables["c"].num_tokens == tables["c"].num_blocks == 0
