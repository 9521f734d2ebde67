"""The columns of a step plan against one plain list per request."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core.request_step import RequestStep, part_of, parts_of, steps_of
from vtoken.base.arrays import Ragged
from vtoken.core.protocol.step import RequestSteps, Retained

Lists = st.lists(st.lists(st.integers(0, 2**40), max_size=5), max_size=8)


@given(Lists, st.data())
def test_a_ragged_array_is_a_list_of_lists(lists: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.joined(lists)
    assert [ragged.of(i).tolist() for i in range(len(lists))] == lists
    assert ragged.counts.tolist() == [len(part) for part in lists]
    assert ragged.values.dtype == ragged.starts.dtype == np.int64
    which = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9)) if lists else []
    taken = ragged.take(np.array(which, dtype=np.int64))
    assert [taken.of(j).tolist() for j in range(len(which))] == [lists[i] for i in which]


def test_an_empty_ragged_array_has_nothing_for_each_request() -> None:
    assert Ragged.empty(3).counts.tolist() == [0, 0, 0]
    assert Ragged.joined([[], [], []]).starts.tolist() == Ragged.empty(3).starts.tolist()


@given(Lists, st.data())
def test_what_a_batch_writes_is_what_each_request_writes(
    new_slots: list[list[int]], data: st.DataObject
) -> None:
    """Also for requests not in the batch, not in the plan, or without writes."""
    names = [f"r{i}" for i in range(len(new_slots))]
    parts = {
        name: RequestStep(0, new_slots=np.array(slots, dtype=np.int64))
        for name, slots in zip(names, new_slots, strict=True)
    }
    steps = steps_of(parts)
    batch = data.draw(st.permutations([*names, "other", "another"]))
    batch = batch[: data.draw(st.integers(0, len(batch)))]
    first = [100 * j for j in range(len(batch))]
    numbers = steps.numbers(batch)
    assert numbers.tolist() == [names.index(name) if name in parts else -1 for name in batch]
    expected = [
        (start + i, slot)
        for name, start in zip(batch, first, strict=True)
        if name in parts
        for i, slot in enumerate(new_slots[names.index(name)])
    ]
    writes = steps.writes(numbers, np.array(first, dtype=np.int64))
    assert [*zip(*writes.tolist(), strict=True)] == expected


def test_parts_become_columns_and_come_back() -> None:
    ids = np.array([3, 5])
    one = RequestStep(
        9,
        *(ids, ids + 1, ids + 40, ids - 3, ids + 50),
        Retained(ids, ids),
        [2, 7],
        ids + 9,
        8,
        False,
        [4],
    )
    other = RequestStep(5, num_live=6)
    steps = steps_of({"a": one, "b": other})
    assert len(steps) == 2
    assert not RequestSteps()
    assert repr(parts_of(steps)) == repr({"a": one, "b": other})
    assert repr(part_of(steps, "b")) == repr(other)
