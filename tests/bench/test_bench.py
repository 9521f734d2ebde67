"""Benchmarks without an engine: runs of the core end to end, results between their markers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from vtoken_bench import main
from vtoken_bench.counters import Instructions
from vtoken_bench.evaluation.effects import Effect
from vtoken_bench.evaluation.points import Run
from vtoken_bench.output import Result, as_text, goals_table
from vtoken_bench.overhead import GROUPS, Slices
from vtoken_bench.planner import PERIOD, SCENARIOS, rounds_of_evictions
from vtoken_bench.slices import LIVE_TOKENS, Variant, longest_tokens, step_metrics
from vtoken_bench.target import Target


@pytest.mark.slow
def test_the_planner_bench_measures_every_situation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "planner.json"
    arguments = ["--requests", "2", "--tokens", "256", "--steps", "4", "--json", str(path)]
    assert main(["planner", *arguments]) == 0
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert [row["situation"] for row in result.raw] == [s.name for s in SCENARIOS]
    assert all(row["step"] > 0 for row in result.raw)
    assert as_text(result) in capsys.readouterr().out


def reads(variant: Variant, slice_number: int, slice_steps: int, count: int) -> int:
    """Tokens that all requests of `variant` read when a slice begins, if none is evicted."""
    texts = [[0] * longest_tokens(slice_steps)] * count
    spec = variant.hold_message(texts, slice_steps)["hold"]
    lives, total = spec["lives_slices"], 0
    for request in spec["requests"]:
        behind = (slice_number + request["phase"]) % lives
        first = slice_number + request["phase"] < lives
        start = len(request["first" if first else "again"]["prompt"])
        total += start + (slice_number if first else behind) * slice_steps
    return total


@pytest.mark.parametrize("count", [8, 16, 48])
def test_growing_requests_read_the_same_number_of_tokens_in_every_slice(count: int) -> None:
    stock = Variant("stock", None)
    totals = {reads(stock, number, 40, count) for number in range(20)}
    (total,) = totals
    middle = total + count * 40 / 2
    assert middle == count * LIVE_TOKENS


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.001] * 10, "met"),
        ([1.3, 1.301] * 10, "missed"),
        ([1.0, 1.2] * 10, "undecided"),  # the mean may be on either side of the goal
        ([1.0], ""),  # one round gives no interval
    ],
)
def test_a_goal_is_decided_by_the_confidence_interval(ratios: list[float], verdict: str) -> None:
    assert Effect(tuple(ratios)).claim("", "", "", "<= 1.1").verdict() == verdict


def slices_of(group: str, instructions: int | None) -> Slices:
    """Twenty rounds in which every variant takes a tenth more than the one before it."""
    runs = []
    for i, variant in enumerate(GROUPS[group]):
        reply = {
            "steps_ms": [10.0 + i, 10.0 + i, 13.0 + i],
            "cpu_seconds": 0.03 * (1 + i / 10),
            "instructions": instructions,
            "tokens": 24,
            "hook_seconds": {"scheduler": 3e-4, "worker": 6e-4},
        }
        runs += [Run({"variant": variant.name}, n, step_metrics(reply)) for n in range(20)]
    return Slices("demo", 8, group, runs)


def test_overhead_is_shown_against_stock_and_its_goals() -> None:
    slices = slices_of("indirection", None)
    table = slices.table()
    assert "instructions a step" not in table.columns
    cells = dict(zip(table.columns, table.rows[-1], strict=True))
    assert cells["variant, against"] == "recycling"
    assert cells["step p50"] == "1.50 [1.50 .. 1.50]"
    assert cells["µs, scheduler"] == "100"
    goals = goals_table(slices.claims())
    assert [str(row[0]).split(",")[0] for row in goals.rows] == [
        "plugin idle",
        "indirection",
        "recycling",
    ]
    assert [row[-1] for row in goals.rows] == ["missed"] * 3
    assert goals.rows[-1][1:3] == ["demo", "1.5 x"]


def test_instructions_are_shown_where_they_are_counted() -> None:
    slices = slices_of("eviction", 6_000)
    table = slices.table()
    assert "instructions a step" in table.columns
    naive = [row[0] for row in table.rows if "naive" in str(row[0])]
    assert naive == ["h2o, naive-evict (holes), against h2o, dense, one layer probed"]
    assert slices.claims() == []  # those are of a trained model


def test_instructions_are_counted_or_the_reason_is_reported() -> None:
    counter = Instructions()
    before = counter.read()
    sum(range(10_000))
    after = counter.read()
    if counter.missing is None:
        assert before is not None
        assert after is not None
        assert after - before > 10_000
    else:
        assert (before, after) == (None, None)


def test_a_cache_is_as_large_as_the_model_needs_it(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"hidden_size": 64}))
    num_blocks = Target().num_blocks(tmp_path, 700, block_size=10)
    assert num_blocks == 80
    args = Target().engine_args(tmp_path, block_size=10, max_model_len=700, num_blocks=num_blocks)
    assert args["kv_cache_memory_bytes"] == 81 * 10 * 3 * 2 * 2 * 8 * 4


def test_a_round_of_evictions_is_spread_over_its_steps() -> None:
    engine = rounds_of_evictions("h2o", 64, 256)
    evicted = []
    for _ in range(PERIOD):
        before = engine.runtime.counters.tokens.evicted
        engine.step(engine.ids)
        evicted.append(engine.runtime.counters.tokens.evicted - before)
    assert sum(evicted) == 64 * PERIOD
    assert max(evicted) <= 4 * PERIOD
