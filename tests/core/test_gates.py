"""When reclamation runs: theta_F, the watermark, pause, off, the rate limit, eager settings,
recycling that leaves nothing to do, and rounds that pay without pressure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.support.core.harness import CoreEngine
from tests.support.core.tables import hole_of
from vtoken.core.config.values import VTokenConfig, merge_patch
from vtoken.core.planning.gates import (
    EMPTY_ROUND_BACKOFF_STEPS,
    Pressure,
    describe_gates,
    first_closed,
    headroom_gate,
)
from vtoken.core.planning.worth import Worth
from vtoken.policies import make_policy
from vtoken.wire import Experiment

OPEN = Pressure(
    f=0.5,
    free_blocks=4,
    steps_since_round=1,
    last_round_empty=False,
    count_low_utilization=lambda: 2,
)
CONFIG = VTokenConfig(theta_f=0.25, low_watermark_blocks=4)


def closed(config: VTokenConfig, pressure: Pressure) -> list[str]:
    """The gates reported closed; the first of them must be the one that decides."""
    names = [gate.name for gate in describe_gates(config, pressure) if not gate.open]
    first = first_closed(config, pressure)
    assert (names[0] if names else None) == first
    return names


def test_the_gates_are_open_under_pressure() -> None:
    assert closed(CONFIG, OPEN) == []


@pytest.mark.parametrize(
    ("name", "config", "pressure", "detail"),
    [
        ("theta_f", CONFIG, replace(OPEN, f=0.25), "F 0.2500 <= theta_F 0.2500"),
        ("theta_f", CONFIG, replace(OPEN, f=0.2), "F 0.20 <= theta_F 0.25"),
        (
            "watermark",
            CONFIG,
            replace(OPEN, free_blocks=5),
            "free 5 > low watermark 4 blocks",
        ),
        (
            "watermark",
            CONFIG,
            replace(OPEN, free_blocks=9, wanted_blocks=3),
            "free 9 less 3 wanted > low watermark 4 blocks",
        ),
        ("pause", CONFIG, replace(OPEN, steps_since_round=0), "0 steps since a round < 1"),
        (
            "pause",
            CONFIG,
            replace(OPEN, last_round_empty=True, steps_since_round=EMPTY_ROUND_BACKOFF_STEPS - 1),
            "7 steps since a round < 8 after one that found nothing",
        ),
        (
            "low_utilization",
            CONFIG,
            replace(OPEN, count_low_utilization=lambda: 1),
            "1 block at most half live < 2",
        ),
        (
            "reclamation",
            structs.replace(CONFIG, reclamation="paused"),
            OPEN,
            "reclamation paused, not auto",
        ),
        (
            "reclamation",
            structs.replace(CONFIG, reclamation="off"),
            OPEN,
            "reclamation off, not auto",
        ),
    ],
)
def test_one_closed_gate_is_enough_and_tells_both_numbers(
    name: str, config: VTokenConfig, pressure: Pressure, detail: str
) -> None:
    assert closed(config, pressure) == [name]
    assert {gate.name: gate.detail for gate in describe_gates(config, pressure)}[name] == detail


def test_blocks_that_a_waiting_request_lacks_open_the_watermark() -> None:
    assert closed(CONFIG, replace(OPEN, free_blocks=9, wanted_blocks=5)) == []


def test_an_empty_round_is_tried_again_after_the_back_off() -> None:
    steps = EMPTY_ROUND_BACKOFF_STEPS
    assert closed(CONFIG, replace(OPEN, last_round_empty=True, steps_since_round=steps)) == []


PAYS, DOES_NOT = Worth(saving_us=50.4, cost_us=9.0), Worth(saving_us=9.0, cost_us=9.0)
CALM = replace(OPEN, f=0.1, free_blocks=400, count_low_utilization=lambda: 0)


def test_a_round_that_pays_needs_no_pressure() -> None:
    priced = replace(CALM, ask_worth=lambda: PAYS)
    assert closed(CONFIG, priced) == []
    details = {gate.name: gate.detail for gate in describe_gates(CONFIG, priced)}
    assert details["theta_f"] == "F 0.10 <= theta_F 0.25, but moving pays"
    assert details["price"] == "saves 50.4 µs > costs 9 µs"
    assert closed(CONFIG, replace(priced, steps_since_round=0)) == ["pause"]
    assert closed(structs.replace(CONFIG, reclamation="paused"), priced) == ["reclamation"]


def test_a_round_that_does_not_pay_waits_for_pressure() -> None:
    calm = replace(CALM, ask_worth=lambda: DOES_NOT)
    assert closed(CONFIG, calm) == ["theta_f", "watermark", "low_utilization", "price"]
    pressed = replace(OPEN, ask_worth=lambda: DOES_NOT)
    assert closed(CONFIG, pressed) == []
    (gate,) = [gate for gate in describe_gates(CONFIG, pressed) if gate.name == "price"]
    assert gate.detail == "saves 9 µs <= costs 9 µs, but under pressure"


def test_under_the_papers_rule_prices_are_not_read() -> None:
    def ask() -> Worth:
        raise AssertionError

    paper = structs.replace(CONFIG, experiment=Experiment(round_rule="paper"))
    assert closed(paper, replace(CALM, ask_worth=ask)) == [
        "theta_f",
        "watermark",
        "low_utilization",
    ]


def test_headroom_is_closed_only_where_it_keeps_a_round_from_any_gain() -> None:
    assert headroom_gate(3, 0, gains=True).detail == "3 fresh blocks suffice"
    assert headroom_gate(3, 5, gains=True).open
    lacking = headroom_gate(3, 5, gains=False)
    assert (lacking.open, lacking.detail) == (False, "3 fresh blocks < 8 needed")


# ---------------------------------------------------------------- in the engine


def holed(num_requests: int = 3, **config: Any) -> CoreEngine:
    """Requests with random holes."""
    values: dict[str, Any] = {
        "policy": {"name": "random", "params": {"recent": 2, "sinks": 1}},
        "budget_tokens": 16,
        "evict_when": "always",
        "interval_tokens": 3,
        "theta_f": 0.0,
        "low_watermark_blocks": 64,
        "recycle": False,
    }
    engine = CoreEngine(num_blocks=64, block_size=4, config=values | config)
    for i in range(num_requests):
        engine.add(f"r{i}", 40, seed=i)
    return engine


@pytest.mark.parametrize(
    "closed",
    [
        {"theta_f": 1.0},
        {"low_watermark_blocks": 0},
        {"reclamation": "paused"},
        {"reclamation": "off"},
    ],
    ids=["theta_f", "watermark", "paused", "off"],
)
def test_a_closed_gate_stops_relocation_but_all_dead_blocks_still_return(
    closed: dict[str, Any],
) -> None:
    engine = holed(**closed, policy={"name": "streaming_llm", "params": {"sinks": 2}}).run(60)
    assert engine.runtime.counters.reclamation.relocations == 0
    assert engine.runtime.counters.reclamation.reclaimed_blocks > 0
    table = engine.runtime.tables["r0"]
    assert all(table.block_live() > 0)


CALM_CONFIG = {"theta_f": 1.0, "low_watermark_blocks": 0}


def relocations_at(hole_us: int, **config: Any) -> list[dict[str, Any]]:
    """All relocations of a run without pressure, where packing a token costs `hole_us`."""
    engine = holed(**config)
    engine.worker.hole_us, engine.worker.copy_us = hole_us, 3
    engine.run(60)
    return [e.data for e in engine.runtime.events.page(0, 10_000, "relocation").events]


@pytest.mark.parametrize("recycle", [True, False])
def test_dear_holes_are_closed_though_nothing_presses(recycle: bool) -> None:
    assert relocations_at(200, recycle=recycle, **CALM_CONFIG)
    assert (
        relocations_at(200, recycle=recycle, experiment={"round_rule": "paper"}, **CALM_CONFIG)
        == []
    )


def unclocked(relocations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in data.items() if not k.endswith("_us")} for data in relocations]


@pytest.mark.parametrize("config", [{}, {"theta_f": 0.3}, CALM_CONFIG], ids=str)
def test_where_holes_cost_nothing_the_rule_is_the_papers(config: dict[str, Any]) -> None:
    paper = unclocked(relocations_at(0, experiment={"round_rule": "paper"}, **config))
    assert unclocked(relocations_at(0, **config)) == paper
    assert unclocked(relocations_at(200, experiment={"round_rule": "paper"}, **config)) == paper


def test_a_round_that_pays_and_finds_nothing_pauses() -> None:
    """`pack` without headroom: the estimate promises a gain that no plan achieves."""
    engine = holed(
        experiment={"planner": "pack"}, headroom_blocks=0, budget_tokens=16, **CALM_CONFIG
    )
    engine.worker.hole_us = 10_000
    engine.run(6)
    engine.runtime.active.config = structs.replace(
        engine.runtime.config, policy=make_policy("none", {})
    )
    rounds = []
    for _ in range(3 * EMPTY_ROUND_BACKOFF_STEPS):
        engine.run(1)
        rounds.append(engine.runtime.relocator.pressure(ahead=0).steps_since_round == 0)
    assert sum(rounds) == 3


def test_pausing_lets_the_relocation_in_flight_finish() -> None:
    engine = holed()
    engine.worker_lag_steps = 1
    while engine.runtime.relocator.num_in_flight_tokens == 0:
        engine.step()
    engine.runtime.active.config = structs.replace(engine.runtime.config, reclamation="paused")
    relocations = engine.runtime.counters.reclamation.relocations
    engine.step()
    assert engine.runtime.counters.reclamation.relocations > relocations
    assert engine.runtime.relocator.num_in_flight_tokens == 0


def packed_excess(engine: CoreEngine) -> int:
    """Blocks held beyond the packed bound."""
    return sum(len(t.blocks) - -(-t.num_live // engine.block_size) for t in engine.runtime.tables)


@pytest.mark.parametrize(
    ("num_requests", "recycle", "most"), [(1, True, 1), (1, False, 2), (4, False, 4)]
)
def test_theta_f_zero_with_the_watermark_at_the_pool_is_eager(
    num_requests: int, recycle: bool, most: int
) -> None:
    """Blocks held equal the packed bound whenever a round has run, within one tail a request.
    Without recycling, holes of a read-only block may wait for room behind the last token."""
    engine = holed(num_requests, recycle=recycle, batch_size=63, headroom_blocks=16).run(2)
    for _ in range(60):
        engine.step()
        assert packed_excess(engine) <= most
    assert engine.runtime.counters.tokens.evicted > 0


@pytest.mark.parametrize("planner", ["pack", "plug"])
def test_rounds_are_bounded_by_b_and_by_the_headroom_over_all_requests(planner: str) -> None:
    engine = holed(
        num_requests=4, batch_size=3, headroom_blocks=1, experiment={"planner": planner}
    ).run(60)
    rounds: dict[int, list[dict[str, Any]]] = {}
    for event in engine.runtime.events.page(0, 10_000).events:
        if event.kind == "relocation":
            rounds.setdefault(event.step, []).append(event.data)
    assert rounds
    for moved in rounds.values():
        num_sources = sum(len(m["source_blocks"]) for m in moved)
        assert num_sources <= 3
        assert num_sources - sum(m["freed_blocks"] for m in moved) <= 1


def test_deferral_says_how_many_blocks_are_missing() -> None:
    engine = holed(experiment={"planner": "pack"}, headroom_blocks=0).run(10)
    events = [e for e in engine.runtime.events.page(0, 1000).events if e.kind == "deferred"]
    assert engine.runtime.counters.reclamation.deferred > 0
    assert len(events) == 1  # rate-limited
    assert events[0].data["needed_blocks"] > events[0].data["available_blocks"] == 0


# ---------------------------------------------------------------- recycling


def blocks_of_a_long_prompt(*, prefix_caching: bool) -> tuple[CoreEngine, list[int]]:
    """Blocks held after each decode step: 700 prompt tokens, budget 256, block size 32."""
    engine = CoreEngine(
        num_blocks=64,
        block_size=32,
        prefix_caching=prefix_caching,
        config={
            "policy": {"name": "streaming_llm"},
            "budget_tokens": 256,
            "evict_when": "always",
            "interval_tokens": 0,
            "theta_f": 0.0,
            "low_watermark_blocks": 64,
        },
    )
    engine.add("a", 700)
    engine.step()
    assert len(engine.store.tables["a"]) == 22
    held = []
    for _ in range(301):
        engine.step()
        held.append(len(engine.store.tables["a"]))
    assert engine.runtime.tables["a"].num_live == 257
    return engine, held


def test_streaming_llm_holds_nine_blocks_for_300_steps_and_moves_nothing() -> None:
    """4 sinks in the first block and 252 recent tokens in eight: recycling keeps it at that."""
    engine, held = blocks_of_a_long_prompt(prefix_caching=False)
    assert held == [9] * 301
    assert engine.runtime.counters.reclamation.moved_tokens == 0


def test_hashed_blocks_are_not_recycled_and_cost_one_block_more() -> None:
    """The prompt's blocks stay in the prefix cache; their holes wait until the block is dead."""
    _, held = blocks_of_a_long_prompt(prefix_caching=True)
    assert held[0] == 9
    assert max(held) == 10


def test_recycled_tokens_keep_their_positions() -> None:
    engine = holed(num_requests=1, recycle=True, reclamation="paused")
    engine.run(30)
    table = engine.runtime.tables["r0"]
    assert engine.runtime.counters.reclamation.recycled_slots > 0
    newest = table.num_tokens - 1
    assert np.array_equal(table.live_ids()[-1:], [newest])


def test_turning_recycling_off_forgets_the_hole_already_picked() -> None:
    engine = holed(num_requests=1, recycle=True, reclamation="paused")
    engine.run(6)
    recycled = engine.runtime.counters.reclamation.recycled_slots
    assert recycled > 0
    engine.runtime.active.config = structs.replace(engine.runtime.config, recycle=False)
    engine.run(3)
    engine.runtime.appender.choose_places()
    assert hole_of(engine.runtime.tables, "r0") == -1
    assert engine.runtime.counters.reclamation.recycled_slots == recycled


# ---------------------------------------------------------------- reported and done


def deferrals(engine: CoreEngine) -> dict[str, int]:
    return {
        name: count
        for name, count in engine.runtime.counters.reclamation.deferrals.items()
        if count
    }


def count_spare_steps(engine: CoreEngine, num_steps: int) -> int:
    """Steps before whose growth a request with holes held more blocks than it needed."""
    choose = engine.runtime.appender.choose_places
    spare: list[bool] = []

    def look_and_choose() -> bool:
        spare.append(
            any(
                table.extent > table.num_live
                and len(table.blocks) > -(-(table.num_live + 1) // engine.block_size)
                for table in engine.runtime.tables
            )
        )
        return choose()

    engine.runtime.appender.choose_places = look_and_choose  # type: ignore[method-assign]
    engine.run(num_steps)
    return sum(spare)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("reclamation", {"reclamation": "paused"}),
        ("reclamation", {"reclamation": "off"}),
        ("theta_f", {"theta_f": 1.0}),
        ("watermark", {"low_watermark_blocks": 0}),
    ],
)
def test_steps_held_back_from_a_gain_count_for_the_gate_that_was_closed(
    name: str, config: dict[str, Any]
) -> None:
    engine = holed(**config)
    held_back = count_spare_steps(engine, 30)
    assert 0 < held_back < 30
    assert deferrals(engine) == {name: held_back}


def test_nothing_is_held_back_where_nothing_could_be_gained() -> None:
    engine = holed(policy={"name": "none"}, reclamation="paused")
    assert count_spare_steps(engine.run(30), 1) == 0
    assert deferrals(engine) == {}


def test_a_manual_compaction_is_not_held_back() -> None:
    engine = holed(reclamation="paused").run(10)
    before = deferrals(engine)
    engine.runtime.operations.add("me", None, 64, False)
    engine.run(1)
    assert deferrals(engine) == before


def test_rounds_without_headroom_and_relocations_in_flight_count_apart() -> None:
    engine = holed(experiment={"planner": "pack"}, headroom_blocks=0).run(10)
    assert deferrals(engine)["headroom"] == engine.runtime.counters.reclamation.deferred > 0
    late = holed(num_requests=1, batch_size=1)
    late.worker_lag_steps = 3
    late.run(40)
    assert late.runtime.counters.reclamation.relocations > 0
    assert deferrals(late)["in_flight"] > 0
    assert "headroom" not in deferrals(late)


def test_a_round_that_waits_for_reports_is_tried_again_at_once() -> None:
    """No back-off: the next relocation follows as soon as this one is reported."""
    engine = holed(num_requests=1, reclamation="off").run(12)
    engine.worker_lag_steps = 2
    runtime = engine.runtime
    runtime.active.config = structs.replace(
        runtime.config, reclamation="auto", batch_size=2, policy=make_policy("none", {})
    )
    moved = []
    for _ in range(12):
        rounds = runtime.relocator.num_rounds
        engine.step()
        moved.append(runtime.relocator.num_rounds > rounds)
    assert moved[:9] == [True, False, False] * 3


@pytest.mark.parametrize(
    "patch",
    [
        {},
        {"theta_f": 0.4},
        {"low_watermark_blocks": 20},
        {"reclamation": "paused"},
        {"batch_size": 1},
        {"experiment": {"planner": "pack"}, "headroom_blocks": 0},
    ],
    ids=lambda patch: ",".join(patch) or "open",
)
@pytest.mark.parametrize("hole_us", [0, 30])
def test_gates_reported_between_two_steps_are_those_of_the_next_one(
    patch: dict[str, Any], hole_us: int
) -> None:
    """From a state with holes, without eviction, which would change it before the gates look."""
    engine = holed(reclamation="off", num_requests=4)
    engine.worker.hole_us = engine.worker.copy_us = hole_us
    engine.run(12)
    runtime = engine.runtime
    runtime.active.config = merge_patch(
        runtime.config,
        {"reclamation": "auto", "policy": {"name": "none"}} | patch,
        num_blocks=64,
        num_layers=4,
    )
    runs = set()
    for _ in range(25):
        gates = describe_gates(runtime.config, runtime.relocator.pressure(ahead=1))
        first = next((gate.name for gate in gates if not gate.open), None)
        before, rounds = dict(runtime.counters.reclamation.deferrals), runtime.relocator.num_rounds
        engine.step()
        ran = runtime.relocator.pressure(ahead=0).steps_since_round == 0
        assert ran == (first is None)
        runs.add(ran)
        after = runtime.counters.reclamation.deferrals
        changed = [name for name in after if after[name] != before[name]]
        if first is not None and changed:
            assert changed == [first]
        assert (runtime.relocator.num_rounds > rounds) <= ran
    assert (True in runs) == ("reclamation" not in patch)
