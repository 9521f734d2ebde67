"""The worker's mirrors against dictionaries, under random plans and wrong plans."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.request_step import RequestStep, steps_of
from tests.support.mirrors import mirrors_of
from vtoken.base.arrays import Ragged
from vtoken.base.errors import MirrorMismatchError
from vtoken.core.protocol.mirror import BlockTables, Mirrors
from vtoken.core.protocol.step import RequestSteps

S = 4


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


class Model:
    """The same requests as dictionaries, id -> slot of live tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.mirrors = Mirrors()
        self.slots: dict[str, dict[int, int]] = {}
        self.num_tokens: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.next_block = 0

    def come(self) -> None:
        """Some requests are met in one step, each with a positional layout."""
        names, tables = [], []
        for _ in range(int(self.rng.integers(1, 4))):
            name, num_tokens = f"r{self.next_block}", int(self.rng.integers(0, 90))
            table = [*range(self.next_block, self.next_block + num_tokens // S + 2)]
            self.next_block = table[-1] + 1
            self.rng.shuffle(table)
            self.slots[name] = {t: table[t // S] * S + t % S for t in range(num_tokens)}
            self.num_tokens[name], self.tables[name] = num_tokens, table
            names.append(name)
            tables.append(table)
        counts = np.array([self.num_tokens[name] for name in names])
        self.mirrors.place(names, counts, S, BlockTables.of(tables))

    def go(self) -> None:
        """Some requests are gone, and one that was never known."""
        gone = [name for name in self.slots if self.rng.random() < 0.3]
        self.mirrors.drop([*gone, "unknown"])
        for name in gone:
            del self.slots[name], self.num_tokens[name], self.tables[name]

    def follow(self) -> None:
        """Requests that have evicted nothing gain tokens in blocks that they already have."""
        names, counts = [], []
        for name, live in self.slots.items():
            most, before = len(self.tables[name]) * S, self.num_tokens[name]
            if before < most and live == {t: self._place(name, t) for t in range(before)}:
                names.append(name)
                self.num_tokens[name] = int(self.rng.integers(before, most + 1))
                counts.append(self.num_tokens[name])
                live |= {t: self._place(name, t) for t in range(before, counts[-1])}
        tables = BlockTables.of([self.tables[name] for name in names] or [[]])
        if names:
            self.mirrors.place(names, np.array(counts), S, tables)

    def take_back(self) -> None:
        """The newest tokens of some requests, and of one that was never known."""
        rejected = {name: int(self.rng.integers(0, 6)) for name in self.slots}
        rejected = {name: min(num, self.num_tokens[name]) for name, num in rejected.items()}
        rows = self.mirrors.rows_of([*rejected])
        before = self.mirrors.columns.version[rows].tolist()
        self.mirrors.truncate({"unknown": 1} | rejected)
        after = self.mirrors.columns.version[rows].tolist()
        assert [new > old for old, new in zip(before, after, strict=True)] == [
            num > 0 for num in rejected.values()
        ]
        for name, num in rejected.items():
            self.num_tokens[name] -= num
            kept = self.num_tokens[name]
            self.slots[name] = {t: slot for t, slot in self.slots[name].items() if t < kept}

    def _place(self, name: str, token: int) -> int:
        return self.tables[name][token // S] * S + token % S

    def plan(self) -> dict[str, RequestStep]:
        """A random step of a random part of the requests, in random order; follows it."""
        parts: dict[str, RequestStep] = {}
        for name in self.rng.permutation(list(self.slots)).tolist():
            if self.rng.random() < 0.2:
                continue
            live, before = self.slots[name], self.num_tokens[name]
            part = parts[name] = RequestStep(before)
            ids = self.rng.permutation(list(live)) if live else ints()
            part.evicted = ids[: int(self.rng.integers(0, 6))].astype(np.int64)
            part.moved_ids = ids[6 : 6 + int(self.rng.integers(0, 6))].astype(np.int64)
            num_new = int(self.rng.choice([0, 1, 1, 1, 40]))
            fresh = (self.next_block + 1) * S + np.arange(len(part.moved_ids) + num_new)
            self.next_block += len(fresh) // S + 2
            self.rng.shuffle(fresh)
            part.moved_slots, part.new_slots = np.split(fresh, [len(part.moved_ids)])
            for token in part.evicted.tolist():
                del live[token]
            live |= dict(zip(part.moved_ids.tolist(), part.moved_slots.tolist(), strict=True))
            live |= dict(zip(range(before, before + num_new), part.new_slots.tolist(), strict=True))
            self.num_tokens[name] += num_new
            part.num_live = len(live)
        return parts

    def check(self) -> None:
        """The mirrors say what the dictionaries say, and their pieces do not overlap."""
        mirrors = self.mirrors
        assert {*mirrors} == {*self.slots}
        rows = mirrors.rows_of([*self.slots])
        assert len({*rows.tolist()}) == len(rows)
        ids, slots = mirrors.live(rows)
        for i, (name, live) in enumerate(self.slots.items()):
            assert dict(zip(ids.of(i).tolist(), slots.of(i).tolist(), strict=True)) == live
            assert ids.of(i).tolist() == sorted(live)
            assert mirrors[name].num_tokens == self.num_tokens[name]
            assert [a.tolist() for a in mirrors[name].live()] == [
                ids.of(i).tolist(),
                slots.of(i).tolist(),
            ]
        facts = mirrors.columns.facts[rows]
        first, capacity = facts["first_token"], facts["token_capacity"]
        assert (facts["num_tokens"] <= capacity).all()
        pieces = sorted(zip(first, first + capacity, strict=True))
        assert all(a[1] <= b[0] for a, b in pairwise(pieces))
        assert not pieces or pieces[-1][1] <= len(mirrors.columns.slots)
        full, loose = mirrors.split(rows, S)
        for i, live in enumerate(self.slots.values()):
            counts = Counter(slot // S for slot in live.values())
            whole = {block for block, count in counts.items() if count == S}
            assert sorted(full.of(i).tolist()) == sorted(whole)
            partial = [live[t] for t in sorted(live) if live[t] // S not in whole]
            assert loose.of(i).tolist() == partial


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_mirrors_follow_any_plan_as_dictionaries_do(seed: int, num_steps: int) -> None:
    model = Model(seed)
    for _ in range(num_steps):
        if model.rng.random() < 0.4:
            model.come()
        if model.rng.random() < 0.2:
            model.go()
        if model.rng.random() < 0.3:
            model.follow()
        if model.rng.random() < 0.3:
            model.take_back()
        before = {name: model.mirrors[name].live()[1].tolist() for name in model.slots}
        versions = {name: model.mirrors.columns.version[m.row] for name, m in model.mirrors.items()}
        parts = model.plan()
        steps = steps_of(parts)
        rows = model.mirrors.apply(steps)
        assert rows.tolist() == [model.mirrors[name].row for name in parts]
        model.check()
        for i, name in enumerate(parts):
            changed = model.mirrors.columns.version[rows[i]] != versions[name]
            slots = model.mirrors[name].live()[1].tolist()
            assert changed or slots[: len(before[name])] == before[name]
            num_new = len(parts[name].new_slots)
            assert slots[len(slots) - num_new :] == parts[name].new_slots.tolist()


def test_memory_follows_the_requests_that_are_there() -> None:
    """4 bytes per token and slack, regardless of how many requests have finished."""
    mirrors = Mirrors()
    for number in range(200):
        tables = BlockTables.of([range(500)])
        mirrors.place([f"{number}"], ints(2000), S, tables)
        mirrors.drop([f"{number - 8}"])
    assert len(mirrors) == 8
    assert len(mirrors.columns.facts) == 16
    assert mirrors.columns.slots.nbytes <= 2.5 * 8 * 2000 * 4
    mirrors.clear()
    assert mirrors.columns.slots.nbytes == 0


def test_a_long_request_grows_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    mirrors = mirrors_of({"a": np.arange(0, dtype=np.int64)})
    pieces = []
    make_room = mirrors.columns.reserve
    monkeypatch.setattr(mirrors.columns, "reserve", lambda *a: (pieces.append(a), make_room(*a)))
    for token in range(5000):
        part = RequestStep(token, new_slots=ints(token), num_live=token + 1)
        mirrors.apply(steps_of({"a": part}))
    assert mirrors["a"].live()[1].tolist() == [*range(5000)]
    assert len(pieces) < 40


def requests(**changed: Any) -> RequestSteps:
    """A step of two requests of 5 and 6 tokens, the second one's changed."""
    first = RequestStep(5, evicted=ints(1), new_slots=ints(50), num_live=5)
    part = RequestStep(6, ints(0), ints(2, 3), ints(60, 61), new_slots=ints(62), num_live=6)
    for name, value in changed.items():
        setattr(part, name, value)
    return steps_of({"a": first, "b": part})


def mirrors_of_two() -> Mirrors:
    return mirrors_of({"a": 100 + np.arange(5), "b": 200 + np.arange(6)})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"num_tokens": 7}, "b: the plan is for 7 tokens, the mirror has 6"),
    "live": ({"num_live": 5}, "b: the plan counts 5 live tokens, the mirror has 6"),
    "one less dies": ({"evicted": ints()}, "b: the plan counts 6 live tokens, the mirror has 7"),
    "dies twice": ({"evicted": ints(0, 0)}, "evicts token 0, which is not live"),
    "dies before it lives": ({"evicted": ints(6)}, "evicts token 6, which is not live"),
    "far away": ({"evicted": ints(10**15)}, "evicts token 1000000000000000, which"),
    "no id": ({"evicted": ints(-1)}, "evicts token -1, which is not live"),
    "a dead one moves": ({"moved_ids": ints(0, 2)}, "moves token 0, which is not live"),
    "a new one moves": ({"moved_ids": ints(2, 6)}, "moves token 6, which is not live"),
    "moves nowhere": ({"moved_slots": ints(60, -1)}, "writes to -1, which is no slot"),
    "moves too far": ({"moved_slots": ints(2**31, 61)}, "writes to 2147483648, which is no slot"),
    "written nowhere": ({"new_slots": ints(-5)}, "writes to -5, which is no slot"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_that_does_not_fit_the_mirror_says_both_numbers(what: str) -> None:
    changed, message = WRONG[what]
    mirrors = mirrors_of_two()
    mirrors.apply(requests())  # the honest one fits
    mirrors = mirrors_of_two()
    arena = mirrors.columns.slots.copy()
    with pytest.raises(MirrorMismatchError, match=message):
        mirrors.apply(requests(**changed))
    written = np.flatnonzero(arena != mirrors.columns.slots)
    offset, capacity = mirrors.columns.first_token, mirrors.columns.token_capacity
    inside = [(offset[r] <= written) & (written < offset[r] + capacity[r]) for r in range(2)]
    assert (inside[0] | inside[1]).all()
    assert mirrors["a"].live()[0].tolist() == [0, 2, 3, 4, 5]


def test_more_rejected_tokens_than_there_are_say_both_numbers() -> None:
    mirrors = mirrors_of_two()
    with pytest.raises(MirrorMismatchError, match="b: 7 tokens were rejected, the mirror has 6"):
        mirrors.truncate({"a": 2, "b": 7})
    assert mirrors["b"].num_tokens == 6


COLUMNS = ("evicted", "moved_ids", "new_slots")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("starts", [(0, 1, 9), (0, 5, 2), (-3, 1, 2), (0, 10**12, 10**12), (0, 1)])
def test_columns_that_do_not_fit_each_other_are_refused(column: str, starts: Any) -> None:
    steps = requests()
    setattr(steps, column, Ragged(getattr(steps, column).values, ints(*starts)))
    with pytest.raises(MirrorMismatchError, match="columns do not fit"):
        mirrors_of_two().apply(steps)


@pytest.mark.parametrize("change", ["num_live", "num_tokens", "moved_slots"])
def test_columns_that_are_too_short_are_refused(change: str) -> None:
    steps = copy.deepcopy(requests())
    if change == "moved_slots":
        steps.moved_slots = steps.moved_slots._replace(values=steps.moved_slots.values[:1])
    else:
        setattr(steps, change, getattr(steps, change)[:1])
    with pytest.raises(MirrorMismatchError, match="columns do not fit"):
        mirrors_of_two().apply(steps)


def test_a_request_that_a_plan_names_twice_is_refused() -> None:
    steps = requests()
    steps.names = ["b", "b"]
    steps.num_tokens[0] = 6
    with pytest.raises(MirrorMismatchError, match="the plan is for 6 tokens, the mirror has 7"):
        mirrors_of_two().apply(replace(steps, num_live=ints(6, 6)))


def test_a_block_table_that_is_too_short_is_refused() -> None:
    mirrors = Mirrors()
    with pytest.raises(MirrorMismatchError, match="for 9 tokens, the block table has room for 8"):
        mirrors.place(["a"], ints(9), S, BlockTables.of([[3, 1]]))


def test_a_request_that_is_followed_never_shrinks() -> None:
    mirrors = mirrors_of_two()
    with pytest.raises(MirrorMismatchError, match="a: the plan is for 4 tokens, the mirror has 5"):
        mirrors.place(["a"], ints(4), S, BlockTables.of([range(8)]))


def test_a_row_that_changes_hands_changes_its_version() -> None:
    mirrors = mirrors_of_two()
    row, version = mirrors["a"].row, mirrors.columns.version[mirrors["a"].row]
    mirrors.drop(["a"])
    mirrors.place(["c"], ints(5), S, BlockTables.of([range(2)]))
    assert mirrors["c"].row == row
    assert mirrors.columns.version[row] != version
    assert mirrors.columns.num_live[row] == 5
