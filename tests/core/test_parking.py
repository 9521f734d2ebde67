"""Parking without an engine: what is copied, what comes back and when, what is given up first."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.core.harness import CoreEngine
from vtoken.base.arrays import Ragged
from vtoken.base.errors import InvariantViolation
from vtoken.core.config.values import merge_patch
from vtoken.core.runtime import parking, prices, restoring
from vtoken.core.runtime.shortage import ADMISSION_US, Shortage

TOKEN_BYTES = 4 * 2 * 2 * 8 * 4  # of the simulated engine
PLENTY = 1 << 20


class Clock:
    """Monotonic seconds that tests advance."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(restoring, "time", made)
    monkeypatch.setattr(parking, "time", made)
    return made


def make(park_bytes: int = PLENTY, **config: Any) -> CoreEngine:
    """One request of 100 tokens that gives under pressure, and room for others."""
    own = {"policy": {"name": "streaming_llm"}, "budget_tokens": 12, "low_watermark_blocks": 4}
    strict = config.pop("strict", True)
    engine = CoreEngine(
        num_blocks=80,
        strict=strict,
        config=own | {"park_bytes": park_bytes, "restore_after_ms": 0} | config,
    )
    engine.reserves = True
    engine.add("long", 100, max_tokens=200)
    return engine


def burst(engine: CoreEngine, num: int = 4) -> None:
    """Let others arrive until the long request has given tokens."""
    engine.run(3)
    before = table_of(engine).live_changes
    for i in range(num):
        engine.add(f"b{engine.runtime.step}-{i}", 60, max_tokens=60)
    for _ in range(40):
        engine.run(1)
        if table_of(engine).live_changes > before:
            return
    raise AssertionError("nobody gave")


def end_burst(engine: CoreEngine) -> None:
    for request in [*engine.running, *engine.waiting]:
        if request.id != "long":
            engine.remove(request.id)


def table_of(engine: CoreEngine, name: str = "long") -> Any:
    return engine.runtime.tables[name]


def configure(engine: CoreEngine, **patch: Any) -> None:
    active = engine.runtime.active
    active.install(merge_patch(active.config, patch, num_blocks=80, num_layers=4))


def test_what_gave_way_comes_back_when_the_burst_is_over() -> None:
    engine = make()
    burst(engine)
    table, counters = table_of(engine), engine.runtime.counters.parking
    assert table.num_parked == table.num_dead > 0
    assert engine.runtime.restorer.waits_for() == "memory"
    end_burst(engine)
    engine.run(10)  # which compares what attention reads with what was written
    assert table.num_dead == table.num_parked == 0
    assert (
        counters.copied_tokens >= counters.restored_tokens == engine.runtime.parking.num_clean > 0
    )
    assert counters.thrashed_tokens == counters.dropped_tokens == 0
    assert engine.runtime.restorer.waits_for() == ""
    assert table.dense
    back = [e.data for e in engine.runtime.events.page(0, 500).events if e.kind == "restored"]
    assert sum(data["tokens"] for data in back) == counters.restored_tokens
    assert {data["reason"] for data in back} == {"memory"}


def test_with_a_copy_that_is_still_there_a_second_eviction_copies_nothing(clock: Clock) -> None:
    engine = make()
    burst(engine)
    end_burst(engine)
    engine.run(10)
    counters = engine.runtime.counters.parking
    table, copied = table_of(engine), counters.copied_tokens
    clean = np.flatnonzero(table.hosts_of() >= 0)
    assert len(clean) == engine.runtime.parking.num_clean
    clock.now += 1.0
    burst(engine)
    again = np.intersect1d(table.parked_ids(), clean)
    assert len(again) == counters.thrashed_tokens > 0
    num_new = engine.runtime.parking.num_parked - len(again)
    assert counters.copied_tokens == copied + num_new


def test_without_host_memory_nothing_is_copied_and_nothing_comes_back() -> None:
    engine = make(park_bytes=0)
    burst(engine)
    end_burst(engine)
    dead = table_of(engine).num_dead
    engine.run(10)
    assert table_of(engine).num_dead == dead
    assert engine.runtime.parking.slots.num_used == 0


@pytest.mark.parametrize("asks", [False, True])
def test_tokens_wait_after_a_shortage_unless_somebody_asks(clock: Clock, asks: bool) -> None:
    engine = make(restore_after_ms=500)
    burst(engine)
    end_burst(engine)
    engine.run(9)
    table = table_of(engine)
    assert table.num_parked
    assert engine.runtime.restorer.waits_for() == "time"
    if asks:
        engine.runtime.restorer.ask("long")
    else:
        clock.now += 0.6
    engine.run(4)
    assert table.num_parked == 0


def test_nothing_comes_back_while_reclamation_is_paused() -> None:
    engine = make()
    burst(engine)
    configure(engine, reclamation="paused")
    end_burst(engine)
    engine.run(10)
    assert table_of(engine).num_parked
    assert engine.runtime.restorer.waits_for() == "resume"
    configure(engine, reclamation="auto")
    engine.run(3)
    assert table_of(engine).num_parked == 0


def test_under_a_fixed_budget_tokens_come_back_up_to_a_raised_one() -> None:
    engine = make(evict_when="always", interval_tokens=4)
    engine.run(6)
    table, runtime = table_of(engine), engine.runtime
    assert table.num_parked == table.num_dead > 0
    assert runtime.restorer.waits_for() == "budget"
    before = table.num_live
    raised = merge_patch(runtime.config, {"budget_tokens": 40}, num_blocks=80, num_layers=4)
    assert runtime.restorer.plan(raised).num_tokens == 40 - before
    configure(engine, budget_tokens=40)
    engine.run(3)
    assert 40 <= table.num_live <= 43
    newest = table.parked_ids().max()  # the sinks and the newest victims are live
    assert newest < table.live_ids()[4]


def test_forgotten_tokens_have_no_copy() -> None:
    engine = make(evict_when="always", interval_tokens=4)
    engine.runtime.requests.forget_tokens("long", ((20, 30),))
    engine.run(6)
    parked = table_of(engine).parked_ids().tolist()
    assert len(parked) == table_of(engine).num_dead - 10
    assert not {*range(20, 30)} & {*parked}
    engine.runtime.requests.forget_tokens("long", ((parked[0], parked[0] + 3),))
    engine.run(1)
    left = {*table_of(engine).parked_ids().tolist()}
    assert left & {*parked} == {*parked[3:]}
    assert engine.runtime.counters.parking.dropped_tokens == 0  # nobody wants them back


def test_full_host_memory_gives_up_clean_copies_first_then_the_oldest_parked() -> None:
    engine = make(park_bytes=100 * TOKEN_BYTES)
    burst(engine)
    host = engine.runtime.parking
    assert host.slots.capacity == 100
    end_burst(engine)
    engine.run(10)
    assert host.num_parked == 0
    num_clean, lost = host.num_clean, engine.runtime.counters.parking.dropped_tokens
    assert num_clean > 20
    engine.runtime.current.number += 1
    ids = table_of(engine).live_ids()
    new = ids[table_of(engine).hosts_of(ids) < 0][4:-2]
    assert len(new) > 100 - num_clean
    park(engine, "long", new)
    assert host.slots.num_used == host.slots.peak == 100
    assert host.num_clean == num_clean - (len(new) - (100 - num_clean))
    assert engine.runtime.counters.parking.dropped_tokens == lost  # they are live


def test_the_least_important_priority_gives_up_its_copies_first() -> None:
    engine = make(park_bytes=30 * TOKEN_BYTES)
    host, tables = engine.runtime.parking, engine.runtime.tables
    engine.add("low", 100, max_tokens=100, priority=5)
    engine.run(3)
    for name in ("long", "low"):
        assert park(engine, name, np.arange(20, 35)) == 15
    engine.runtime.current.number += 1
    assert park(engine, "long", np.arange(40, 50)) == 10
    assert tables["long"].num_parked == 25
    assert tables["low"].num_parked == 5
    assert engine.runtime.counters.parking.dropped_tokens == 10
    engine.runtime.current.number += 1
    assert park(engine, "low", np.arange(60, 70)) == 5  # none of the more important request
    assert tables["long"].num_parked == 25
    host.check()


def park(engine: CoreEngine, name: str, ids: Any) -> int:
    """Let these tokens of a request die and be parked; returns how many have a copy."""
    tables, victims = engine.runtime.tables, Ragged.joined([ids])
    rows = np.array([tables[name].row])
    codes, _ = tables.evict(rows, victims, np.array([-1]), Ragged.empty(1))
    assert codes.tolist() == [0]
    return engine.runtime.parking.park(rows, victims)


def test_refused_host_memory_loses_the_step_alone_and_parks_nothing_more() -> None:
    engine = make()
    engine.worker.refuses_memory = True
    burst(engine)
    host, counters = engine.runtime.parking, engine.runtime.counters
    engine.run(1)
    assert host.fault == "no memory"
    assert not host.is_on
    assert host.slots.num_used == 0
    assert counters.parking.dropped_tokens > 0
    assert counters.invariants.violations == 0
    engine.worker.refuses_memory = False
    end_burst(engine)
    configure(engine, park_bytes=PLENTY // 2)
    engine.run(5)
    assert host.is_on
    assert park(engine, "long", table_of(engine).live_ids()[4:6]) == host.num_parked == 2


def test_after_a_refusal_parking_slows_no_admission_until_the_setting_changes() -> None:
    engine = make()
    engine.worker.refuses_memory = True
    burst(engine)
    engine.run(1)
    runtime, asked = engine.runtime, Shortage(asked_blocks=50)
    for _ in range(prices.WINDOW):
        runtime.prices.copies.add(1, 1)
        runtime.prices.parks.add(ADMISSION_US, 1)
    changed = msgspec.structs.replace(runtime.config, park_bytes=PLENTY // 2)
    assert runtime.shortages.to_give(asked, runtime.config) > 1
    assert runtime.shortages.to_give(asked, changed) == 1


def test_less_host_memory_loses_what_lies_above_it_and_a_dry_run_says_how_much() -> None:
    engine = make()
    burst(engine)
    host = engine.runtime.parking
    num_parked, few = host.num_parked, 10 * TOKEN_BYTES
    assert host.lost_by(few) == num_parked - 10
    assert host.lost_by(PLENTY) == 0
    configure(engine, park_bytes=few)
    engine.run(1)
    assert host.slots.capacity == 10
    assert engine.runtime.counters.parking.dropped_tokens >= num_parked - 10
    engine.run(3)


def test_a_preempted_request_gives_its_host_slots_back() -> None:
    engine = make()
    burst(engine)
    host = engine.runtime.parking
    assert host.num_parked
    for _ in [*engine.running]:
        engine.preempt_newest()
    assert host.slots.num_used == 0
    host.check()
    engine.run(3)


@pytest.mark.parametrize("count", ["parked_tokens", "restored_tokens"])
def test_a_report_must_count_every_copy(count: str) -> None:
    engine, cause = make(), burst
    if count == "restored_tokens":
        burst(engine)
        end_burst(engine)
        cause = partial(CoreEngine.run, num_steps=9)
    execute = engine.worker.execute

    def lying(message: Any) -> Any:
        report = execute(message)
        setattr(report, count, max(0, getattr(report, count) - 1))
        return report

    engine.worker.execute = lying  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="I3"):
        cause(engine)
