"""The part `parking` without an engine: its ground, its counters, and what follows from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.core.config.values import default_config, merge_patch
from vtoken_bench.evaluation import parking
from vtoken_bench.evaluation.bursts import Bursts
from vtoken_bench.evaluation.points import Run, Setting
from vtoken_bench.evaluation.variants import NATIVE, PARKED, configuration
from vtoken_bench.output import new_result
from vtoken_bench.vllm.load import OVER_S, Outlived

SETTING = Setting("trained", 32, quick=False, repeats=8)


def held(**given: int) -> dict[str, Any]:
    return {name: SimpleNamespace(given_tokens=count) for name, count in given.items()}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # clock, who waits, what running requests have given
        ([(0.0, 0, held(a=8, b=4)), (0.4, 0, held(a=8, b=4)), (0.6, 0, held(a=8))], 8),
        ([(0.0, 0, held(a=8)), (0.4, 1, held(a=8)), (0.6, 0, held(a=8))], 0),
        ([(0.0, 0, held(a=8)), (0.6, 0, held(a=8)), (1.6, 0, held(a=8))], 8),
        ([(0.0, 0, held(a=8)), (0.6, 0, held(a=8)), (1.0, 0, held(a=9)), (1.6, 0, held(a=9))], 9),
        ([(0.0, 0, held(a=8)), (0.3, 0, held(a=9)), (0.6, 0, held(a=9))], 0),
    ],
    ids=["ended before", "waits", "counted once", "again", "not over"],
)
def test_given_tokens_outlive_a_shortage_if_their_request_runs_when_it_is_over(
    steps: list[tuple[float, int, dict[str, Any]]], expected: int
) -> None:
    assert OVER_S == 0.5
    runtime = SimpleNamespace(requests=SimpleNamespace(held={}))
    scheduler = SimpleNamespace(vtoken=runtime, waiting=[])
    outlived = Outlived(scheduler)
    for clock, waiting, requests in steps:
        scheduler.waiting, runtime.requests.held = [None] * waiting, requests
        outlived.note(clock)
    assert outlived.tokens == expected


def test_host_memory_is_a_share_of_the_pool() -> None:
    found = configuration({PARKED: 0.25}, 100, block_bytes=4096)
    assert found["park_bytes"] == 25 * 4096
    assert PARKED not in found


def alone() -> list[Run]:
    """What native did alone: two chats a second, and the first long request ended after 20 s."""
    kinds = [f"{parking.ALONE}, {kind}" for kind in parking.KINDS]
    requests = [[0.0, 1.0, 20.0, 400], [0.5, 1.0, 24.0, 500]]
    return [
        Run({"situation": kinds[0], "variant": NATIVE}, 0, {"seconds": 6.0}),
        Run({"situation": kinds[1], "variant": NATIVE}, 0, {"requests": requests}),
    ]


def test_the_burst_follows_from_what_native_does_alone() -> None:
    comparisons = parking.others(SETTING, alone())
    for point in (point for comparison in comparisons for point in comparison.points):
        blocks = point.engine.num_blocks
        patch = configuration(point.config, blocks)
        merge_patch(default_config(blocks), patch, num_blocks=blocks, num_layers=4)
    some, rest, *_ = comparisons
    (ground,) = {point.workload for point in (*some.points, *rest.points)}
    assert isinstance(ground, Bursts)
    assert ground.starts_s == (8.0,)
    assert {point.num_requests for point in some.points} == {4 + 12}  # 2 a second, times 3, 2 s
    assert (some.first, some.repeats, rest.first, rest.repeats) == (0, 3, 3, 8)
    labels = [[str(point.labels["variant"]) for point in part.points] for part in (some, rest)]
    assert labels[0] == [*labels[1], *parking.SIZES]
    assert labels[1] == [NATIVE, *parking.ARMS]


def measured(variant: str, repeat: int) -> dict[str, Any]:
    """Half of the facts found by native and with parking, none by the others."""
    percentiles = {"p50": 10.0 + repeat, "p95": 20.0 + repeat}
    return {
        "found": [variant in (NATIVE, parking.PARKING, parking.TWICE), False],
        "tokens": 100.0 + repeat,
        "seconds": 10.0,
        "cpu_seconds": 10.0 + repeat,
        "ttft_ms": percentiles,
        "itl_ms": percentiles,
        "prompt_tokens": 10,
        "computed_tokens": 200,
        **dict.fromkeys(("preemptions", "given_tokens", "outlived_tokens", "dropped_tokens"), 8),
        "parked_tokens": 0,
        "restored_tokens": 50,
        "thrashed_tokens": 1,
        "park_peak_bytes": 2**20,
    }


def test_it_reports_every_situation_and_decides_its_goals() -> None:
    runs = [
        Run(point.labels, repeat, measured(str(point.labels["variant"]), repeat))
        for comparison in parking.others(SETTING, alone())
        for point in comparison.points
        for repeat in range(comparison.first, comparison.repeats)
    ]
    result = new_result("evaluation-parking", "make bench-parking", {})
    parking.report(result, "trained", alone() + runs)
    rows = [[row[0] for row in table.rows] for table in result.tables]
    everybody = [NATIVE, *parking.ARMS, *parking.SIZES]
    deep = [NATIVE, *parking.DEEP_ARMS]
    assert rows[:4] == [everybody, everybody[1:], deep, deep[1:]]
    assert result.tables[-1].title == "Goals"
    assert all(None not in row[1:] for n in (1, 3, 4) for row in result.tables[n].rows)
    goals = {claim.what: (claim.verdict(), claim.repeats) for claim in result.claims if claim.goal}
    assert goals == {
        f"Bursts: facts, {parking.PRESSURE}, less native's": ("met", 8),
        f"Bursts: facts, {parking.PARKING}, less native's": ("met", 8),
        f"Deep: facts, {parking.PRESSURE}, less native's": ("met", 6),
        f"Deep: facts, {parking.PARKING}, less native's": ("met", 6),
        f"Deep: facts, {parking.TWICE}, less native's": ("met", 6),
        "Bursts: tokens a second of parking, of pressure": ("met", 8),
        "Deep: tokens a second of parking, of pressure": ("met", 6),
        "Deep: tokens a second of twice the host, of pressure": ("met", 6),
        "Ample: CPU time of parking, of policy none": ("met", 3),
        "Bursts: restored tokens that gave way again within 5 s": ("met", 14),
        "Ample: tokens copied": ("met", 3),
    }


def test_what_is_computed_again_is_beyond_prompts_and_answers() -> None:
    figures = {"prompt_tokens": 100, "tokens": 20}
    figures["computed_tokens"] = 120 - parking.SWAP_REQUESTS
    assert parking.recomputed(Run({}, 0, figures)) == 0
    assert parking.recomputed(Run({}, 0, figures | {"computed_tokens": 150})) == 36
