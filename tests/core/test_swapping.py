"""Requests that are swapped instead of computed again: copies, places, and every way to give up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine, SimulatedWorker
from vtoken.base.arrays import Ragged
from vtoken.base.errors import InvariantViolation
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.config.values import merge_patch
from vtoken.core.protocol.step import StepPlan
from vtoken.core.runtime.swapping import OBSTACLES
from vtoken.policies import make_policy

NONE = {"policy": {"name": "none"}}
WINDOW = {
    "policy": {"name": "sliding_window"},
    "budget_tokens": 6,
    "interval_tokens": 1,
    "evict_when": "always",
}


def make(
    config: dict[str, Any], num_blocks: int = 10, prompt_tokens: int = 11, **arguments: Any
) -> CoreEngine:
    """Requests `old`, which evicts nothing, and `new`, which is preempted soon."""
    engine = CoreEngine(
        num_blocks=num_blocks, config={"park_bytes": 1 << 20, **config}, **arguments
    )
    measure(engine)
    engine.add("old", 13, max_tokens=30, rules=RequestRules(policy=make_policy("none", {})))
    engine.add("new", prompt_tokens, max_tokens=30)
    return engine


def measure(engine: CoreEngine, prefill_us: float = 1000.0) -> None:
    for _ in range(3):
        engine.runtime.prices.prefills.add(prefill_us, 1)


def swap_out(config: dict[str, Any] = NONE, **arguments: Any) -> CoreEngine:
    """`new` is swapped."""
    engine = make(config, **arguments)
    for _ in range(40):
        engine.run(1)
        if engine.num_preemptions:
            break
    assert [*engine.runtime.swapper.requests] == ["new"]
    return engine


def preempt_again(engine: CoreEngine) -> None:
    """`new` runs alone and is preempted for a third request."""
    engine.add("third", 13)
    engine.run(1)
    engine.running.reverse()  # so that `new` is preempted
    for _ in range(20):
        engine.run(1)
        if engine.num_preemptions > 1:
            break


def events(engine: CoreEngine, kind: str) -> list[Any]:
    return [event for event in engine.runtime.events.page(None, 1000).events if event.kind == kind]


def configure(engine: CoreEngine, **patch: Any) -> None:
    runtime = engine.runtime
    runtime.active.config = merge_patch(
        runtime.config, patch, num_blocks=runtime.geometry.num_blocks, num_layers=4
    )


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("config", [NONE, WINDOW], ids=["intact", "evicted"])
def test_a_swapped_request_goes_on_and_nothing_is_computed_again(
    config: dict[str, Any], lag: int
) -> None:
    engine = swap_out(config, worker_lag_steps=lag)
    written = engine.waiting[0].written.copy()
    engine.remove("old")
    engine.run(3 + lag)
    request = engine.running[0]
    assert request.written[: len(written)] == written
    engine.run(5)
    counters = engine.runtime.counters
    assert counters.invariants.violations == 0
    assert counters.parking.swapped_requests == 1
    assert counters.parking.dropped_tokens == counters.parking.restored_tokens == 0


def test_a_swapped_request_owns_its_host_slots_until_it_resumes() -> None:
    engine = swap_out()
    parking, swapped = engine.runtime.parking, engine.runtime.swapper.requests["new"]
    assert swapped.num_live == swapped.num_tokens == parking.slots.num_used
    assert parking.num_parked == parking.num_clean == 0
    parking.slots.token[swapped.hosts[0]] += 1
    with pytest.raises(InvariantViolation, match="I5"):
        engine.runtime.check()
    parking.slots.token[swapped.hosts[0]] -= 1
    engine.remove("old")
    engine.run(1)
    assert not engine.runtime.swapper.requests
    assert parking.num_clean == swapped.num_tokens  # their next copy is there
    assert [e.data["reason"] for e in events(engine, "restored")] == ["swap"]


def test_a_second_swap_copies_only_what_is_new() -> None:
    engine = swap_out()
    first = engine.runtime.swapper.requests["new"].num_tokens
    engine.remove("old")
    engine.run(2)
    preempt_again(engine)
    counters = engine.runtime.counters.parking
    second = engine.runtime.swapper.requests["new"].num_tokens
    assert first < second
    assert (counters.swapped_requests, counters.swapped_tokens) == (2, first + second)
    assert counters.copied_tokens == second
    engine.remove("third")
    engine.run(3)


def test_no_swap_gives_up_copies_of_the_request_itself() -> None:
    engine = swap_out()
    runtime = engine.runtime
    first = runtime.swapper.requests["new"].num_tokens
    engine.remove("old")
    engine.run(2)
    assert runtime.parking.num_clean == first
    configure(engine, park_bytes=first * runtime.geometry.bytes_per_token)  # full of its copies
    preempt_again(engine)
    assert runtime.counters.parking.swaps_refused == {"memory": 1}
    assert runtime.counters.invariants.violations == 0
    assert not runtime.swapper.requests


def test_blocks_that_a_resumed_request_hashes_hold_what_was_parked() -> None:
    """Another request with the same prompt hits them in the step that restores them."""
    engine = make(NONE)
    engine.remove("new")
    engine.add("new", 11, prefix="p", prefix_tokens=8, max_tokens=30)
    for _ in range(20):
        engine.run(1)
        if engine.num_preemptions:
            break
    engine.add("twin", 11, prefix="p", prefix_tokens=8)
    for block in [*engine.store.cached]:
        engine.store.cached.pop(block)  # nobody hits what the swapped request has left
    engine.store.hash = [None] * engine.store.num_blocks
    engine.remove("old")
    engine.run(1)
    assert [r.id for r in engine.running] == ["new", "twin"]
    new, twin = (engine.runtime.tables[name] for name in ("new", "twin"))
    assert not new.virtual
    assert new.blocks[:2] == twin.blocks[:2]
    engine.run(4)


def test_a_request_that_has_evicted_is_never_hashed_again() -> None:
    engine = swap_out(WINDOW)
    assert engine.runtime.swapper.has_evicted("new")
    engine.remove("old")
    engine.run(1)
    table = engine.runtime.tables["new"]
    assert table.virtual
    assert table.dense
    assert not any(engine.store.hash[block] for block in table.blocks)
    assert engine.newest_plan.requests.resumed == {"new"}


@pytest.mark.parametrize(
    ("why", "config", "arguments"),
    [
        ("price", NONE, {}),
        ("memory", NONE | {"park_bytes": 512 * 10}, {}),
        ("groups", NONE, {"window": 64, "num_blocks": 20}),
        ("prompt", NONE, {"prefill_chunk_tokens": 2}),
    ],
)
def test_a_request_that_cannot_be_swapped_is_computed_again_and_the_reason_counted(
    why: str, config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    engine = make(config, prompt_tokens=21 if why == "prompt" else 11, **arguments)
    if why == "price":
        measure(engine, prefill_us=0.0)
        measure(engine, prefill_us=0.0)
    for _ in range(40):
        engine.run(1)
        if engine.num_preemptions:
            break
    counters = engine.runtime.counters.parking
    assert (counters.swaps_refused, counters.swapped_requests) == ({why: 1}, 0)
    (event,) = events(engine, "preemption")
    assert event.data["obstacle"] == why
    assert event.summary.endswith(OBSTACLES[why])
    assert engine.waiting[0].num_computed == 0
    engine.remove("old")
    engine.run(12)


def test_a_preemption_between_two_steps_is_never_a_swap() -> None:
    """No plan is under way that could copy anything before its blocks are written."""
    engine = make(NONE).run(4)
    engine.preempt_newest()
    assert engine.runtime.counters.parking.swaps_refused == {"unsettled": 1}
    engine.run(8)


def test_tokens_that_are_moved_in_the_step_of_a_preemption_are_computed_again() -> None:
    engine = make(WINDOW | {"recycle": False}).run(6)
    runtime, table = engine.runtime, engine.runtime.tables["new"]
    runtime.begin_step([])
    runtime.current.decisions.moved[table.row] = table.live_ids()[:1], table.live_ids()[:1]
    assert runtime.swapper.obstacle(table, settled=True) == "moving"


def test_without_host_memory_preemptions_say_nothing_of_swaps() -> None:
    engine = make(NONE | {"park_bytes": 0})
    for _ in range(20):
        engine.run(1)
        if engine.num_preemptions:
            break
    (event,) = events(engine, "preemption")
    assert (event.data["obstacle"], event.data["swapped_tokens"]) == ("", 0)
    assert engine.runtime.counters.parking.swaps_refused == {}


def test_a_swapped_request_that_ends_frees_its_host_slots() -> None:
    engine = swap_out()
    engine.remove("new")
    assert engine.runtime.parking.slots.num_used == 0
    engine.run(3)


@pytest.mark.parametrize("park_bytes", [0, 512 * 8])
def test_less_host_memory_lets_swapped_requests_be_computed_again(park_bytes: int) -> None:
    engine = swap_out()
    num_tokens = engine.runtime.swapper.requests["new"].num_tokens
    configure(engine, park_bytes=park_bytes)
    engine.run(1)
    assert not engine.runtime.swapper.requests
    assert engine.runtime.parking.slots.num_used == 0
    (event,) = events(engine, "parking")
    assert event.data["recomputed_tokens"] == num_tokens
    assert engine.runtime.counters.parking.dropped_tokens == 0  # nothing is lost
    engine.remove("old")
    engine.run(8)
    assert engine.running[0].written[:num_tokens]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_host_that_refuses_memory_lets_the_request_be_computed_again(lag: int) -> None:
    engine = make(NONE, worker_lag_steps=lag)
    engine.worker.refuses_memory = True
    for _ in range(20):
        engine.run(1)
        if engine.num_preemptions:
            break
    engine.run(lag)
    assert not engine.runtime.swapper.requests
    engine.remove("old")
    engine.run(8)
    assert not events(engine, "restored")
    assert engine.runtime.counters.invariants.violations == 0


def test_a_request_resumes_only_after_its_copies_are_reported() -> None:
    engine = swap_out(worker_lag_steps=3)
    engine.remove("old")
    waited = 0
    while engine.waiting:
        engine.run(1)
        waited += 1
    assert waited > 1
    engine.run(4)


def test_tokens_that_would_be_lost_take_the_host_memory_of_a_swapped_request() -> None:
    """It is computed again, and loses nothing by it."""
    engine = swap_out(NONE | {"park_bytes": 512 * 20})
    parking, table = engine.runtime.parking, engine.runtime.tables["old"]
    victims = table.live_ids()[: parking.slots.num_free + 1]
    rows = np.array([table.row])
    engine.runtime.begin_step([])
    parking.park(rows, Ragged.joined([victims]))
    assert not engine.runtime.swapper.requests
    (event,) = events(engine, "parking")
    assert event.data["reason"] == "host memory is full"


def test_a_swap_takes_no_host_memory_of_parked_tokens() -> None:
    engine = make(WINDOW | {"park_bytes": 512 * 12}).run(8)
    parking, table = engine.runtime.parking, engine.runtime.tables["new"]
    before = table.num_parked
    assert before > 0
    assert not parking.make_room_for_swap(table.row, parking.slots.num_free + 1)
    assert table.num_parked == before


def test_control_a_gather_after_the_blocks_are_reused_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker parks when `old` has written to the blocks of `new`."""
    park = SimulatedWorker.park_slots
    late: list[Any] = []

    def note(_: SimulatedWorker, plan: StepPlan) -> int:
        late.append(plan)
        return len(plan.park_slots)

    monkeypatch.setattr(SimulatedWorker, "park_slots", note)
    engine = swap_out().run(6)
    for plan in late:
        park(engine.worker, plan)
    engine.remove("old")
    with pytest.raises(AssertionError, match="I1"):
        engine.run(2)


def test_control_a_restore_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = swap_out()
    monkeypatch.setattr(SimulatedWorker, "restore_slots", lambda *_: None)
    engine.remove("old")
    with pytest.raises(AssertionError, match="I1"):
        engine.run(2)
