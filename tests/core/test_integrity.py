"""The content check distinguishes every way in which a relocation can damage a token."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core.harness import CoreEngine
from vtoken.core.config.values import merge_patch
from vtoken.core.protocol.integrity import difference, fingerprint, misplaced, order_dependence
from vtoken.core.protocol.step import Parked, StepPlan, WorkerReport
from vtoken.vllm.worker import content_check

IDS = np.array([0, 3, 4, 9])
KV = np.arange(2 * 3 * 4 * 8, dtype=np.float32).reshape(2, 3, 4, 8)  # K and V, layers, tokens, D


def of(ids: npt.NDArray[np.int64] = IDS, kv: Any = KV) -> Any:
    return fingerprint(
        ids, [(np.ascontiguousarray(k), np.ascontiguousarray(v)) for k, v in zip(*kv, strict=True)]
    )


def test_equal_contents_differ_in_nothing() -> None:
    assert difference(of(), of(IDS.copy(), KV.copy())) is None


def exchange(kv: Any) -> None:
    kv[:, 1, [0, 2]] = kv[:, 1, [2, 0]]


def flip_a_bit_of_k(kv: Any) -> None:
    kv.view(np.uint32)[0, 1, 3, 5] ^= 1


def flip_a_bit_of_v(kv: Any) -> None:
    kv.view(np.uint32)[1, 1, 3, 5] ^= 1


def swap_k_and_v(kv: Any) -> None:
    kv[:, 1] = kv[::-1, 1].copy()


@pytest.mark.parametrize("damage", [exchange, flip_a_bit_of_k, flip_a_bit_of_v, swap_k_and_v])
def test_changed_contents_are_named_with_their_layer(damage: Callable[[Any], None]) -> None:
    kv = KV.copy()
    damage(kv)
    assert difference(of(), of(kv=kv)) == "K/V of 4 retained tokens changed, first in layer 1"


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 3, 9], r"1 lost \[4\]"),
        ([0, 3, 4, 5, 9], r"1 new \[5\]"),
        ([0, 3, 5, 9], r"1 lost \[4\], 1 new \[5\]"),
    ],
)
def test_lost_and_new_ids_are_named(ids: list[int], words: str) -> None:
    import re

    assert re.search(words, difference(of(), of(np.array(ids))) or "")


def test_a_slot_outside_the_blocks_or_taken_twice_is_misplaced() -> None:
    assert misplaced(np.array([4, 5, 12]), [1, 3], 4) is None
    assert misplaced(np.array([4, 5, 8]), [1, 3], 4) == "slot 8 is in none of the request's blocks"
    assert misplaced(np.array([4, -1]), [1, 3], 4) == "slot -1 is in none of the request's blocks"
    assert misplaced(np.array([4, 5, 4]), [1, 3], 4) == "3 live tokens have 2 slots"


@given(st.lists(st.integers(0, 300), max_size=40), st.lists(st.integers(0, 300), max_size=40))
def test_order_dependence_is_what_sets_of_slots_say(
    source: list[int], destination: list[int]
) -> None:
    marks = np.zeros(301, dtype=np.uint8)
    slots = np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64)
    found = order_dependence(*slots, marks)
    assert not marks.any()
    both = sum(slot in destination for slot in source)
    twice = len(destination) - len(set(destination))
    expected = f"reads and writes {both} slots, and writes {twice} more than once"
    assert found == (expected if both or twice else None)


@pytest.mark.parametrize(("ratio", "share"), [(0.0, 0.0), (0.1, 0.1), (1 / 3, 1 / 3), (1.0, 1.0)])
def test_the_ratio_is_a_share_of_relocations_and_live(ratio: float, share: float) -> None:
    engine = CoreEngine(
        num_blocks=40,
        config={
            "policy": {"name": "random", "params": {"recent": 2, "sinks": 1}},
            "budget_tokens": 10,
            "evict_when": "always",
            "interval_tokens": 4,
            "theta_f": 0.0,
            "low_watermark_blocks": 40,
            "recycle": False,
            "verify_ratio": 0.0,
        },
    )
    for i in range(4):
        engine.add(f"r{i}", 20, seed=i)
    runtime, counters = engine.runtime, engine.runtime.counters
    engine.steps(40)
    assert counters.reclamation.relocations > 5
    assert counters.invariants.verified_relocations == 0
    before = counters.reclamation.relocations
    runtime.active.config = merge_patch(
        runtime.config, {"verify_ratio": ratio}, num_blocks=40, num_layers=4
    )
    while counters.reclamation.relocations < before + 60:
        engine.step()
    found = counters.invariants.verified_relocations / (counters.reclamation.relocations - before)
    assert found == pytest.approx(share, abs=1 / 60)


def test_comparing_what_came_back_counts_as_time_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a step that verifies no relocation."""
    now_ns = 0

    def contents(slots: npt.NDArray[np.int64]) -> Any:
        nonlocal now_ns
        now_ns += 1_000_000
        return [(KV[0, 0, : len(slots)].tobytes(), KV[1, 0, : len(slots)].tobytes())]

    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns)
    monkeypatch.setattr(content_check, "time", clock)
    check = content_check.ContentCheck(contents, block_size=4)
    places = np.arange(2)
    parks = StepPlan(1, park_slots=places, park_hosts=places)
    parks.checked_parks["a"] = Parked(IDS[:2], places)
    restores = StepPlan(2, restore_hosts=places, restore_slots=places)
    spent = []
    for plan in (parks, restores, StepPlan(3)):
        report = WorkerReport(plan.step)
        check.before(plan, {}, report)
        check.after(plan, {}, report)
        spent.append(report.verify_us)
    assert spent == [1000, 1000, 0]
