"""Benchmarks without an engine: runs of the core end to end, results between their markers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from vtoken_bench import BENCHES, growth, main
from vtoken_bench.charts import Chart
from vtoken_bench.claims import ALSO_TRAINED, HEADLINES, Claim, claims_table, headlines_table
from vtoken_bench.counters import Instructions
from vtoken_bench.decoding import Decoding
from vtoken_bench.growth import MEASURED
from vtoken_bench.output import PAGES, SECTION, Result, Table, as_markdown, as_text, fill_in
from vtoken_bench.overhead import GROUPS, Run, claims, goals_table, ratios_table
from vtoken_bench.planner import PERIOD, SCENARIOS, rounds_of_evictions
from vtoken_bench.samples import BINS, sample, summary
from vtoken_bench.sizes import deep_bytes
from vtoken_bench.slices import LIVE_TOKENS, Rounds, Variant, compare, longest_tokens, step_metrics
from vtoken_bench.target import Target

PAGE = "# Results\n\nprose\n\n<!-- bench:planner -->\nold\n<!-- /bench -->\n\nmore prose\n"


def saved(folder: Path, rows: list[list[str | int | float | None]]) -> Path:
    result = Result("planner", "make bench-planner", {"steps": 1}, [Table("T", ["a", "b"], rows)])
    result.machine = {"cpu": "c", "python": "3", "versions": {}}
    result.commit = "abc1234"
    (folder / "planner.json").write_bytes(msgspec.json.encode(result))
    return folder


def test_a_result_replaces_only_the_text_between_its_markers(tmp_path: Path) -> None:
    text, filled, missing = fill_in(PAGE, saved(tmp_path, [["x", 1234.5], ["y", None]]))
    assert (filled, missing) == (["planner"], [])
    assert text.startswith("# Results\n\nprose\n\n<!-- bench:planner -->\n")
    assert text.endswith("<!-- /bench -->\n\nmore prose\n")
    assert "| x | 1,234 |" in text
    assert "`make bench-planner` at abc1234, " in text
    assert "old" not in text
    assert fill_in(text, tmp_path)[0] == text


def test_a_section_with_a_word_has_tables_of_this_beginning_and_no_chart(tmp_path: Path) -> None:
    path = saved(tmp_path, [["x", 1.5, None]]) / "planner.json"
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    result.tables += [Table("demo: one", ["a"], [["y"]]), Table("trained: one", ["a"], [["z"]])]
    result.sentences = ["It is so."]
    result.charts = [Chart("Cost", [])]
    path.write_bytes(msgspec.json.encode(result))
    whole, part = (
        fill_in(f"<!-- bench:planner{word} -->\n<!-- /bench -->\n", tmp_path)[0]
        for word in ("", " trained")
    )
    titles = ("**T**", "**demo: one**", "**trained: one**")
    assert [title in whole for title in titles] == [True] * 3
    assert [title in part for title in titles] == [False, False, True]
    assert "![Cost]" in whole
    assert "![Cost]" not in part
    assert "\n\nIt is so.\n\n" in part
    assert part.startswith("<!-- bench:planner trained -->\n")
    assert fill_in(part, tmp_path)[0] == part


def test_a_bar_within_a_cell_does_not_end_it(tmp_path: Path) -> None:
    path = saved(tmp_path, [["1.0 | 2.0", "x"]]) / "planner.json"
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert "| 1.0 \\| 2.0 | x |" in as_markdown(result)
    assert "1.0 | 2.0" in as_text(result)


def test_the_line_above_a_table_says_when_each_model_was_measured(tmp_path: Path) -> None:
    path = saved(tmp_path, []) / "planner.json"
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    result.measured = {"demo": "2026-01-01 10:00 UTC at abc", "trained": "2026-01-02 at abd"}
    line = as_markdown(result).splitlines()[0]
    stamp = "measured demo 2026-01-01 10:00 UTC at abc; trained 2026-01-02 at abd; "
    assert line.startswith(f"`make bench-planner`, {stamp}")


def test_headlines_are_few_and_in_their_order(tmp_path: Path) -> None:
    row, what, _ = HEADLINES[-1]
    claims = [
        Claim(row, what, ALSO_TRAINED, 2.0, 1.0, 3.0, "x", 3),
        Claim("Fig. 2", "something else", "demo", 1.0, 1.0, 1.0, "x", 1),
        Claim(*HEADLINES[0], 1.5, 1.4, 1.6, "x", 3, "", ">= 1.2", (1.3, 1.7), [1.4, 1.5, 1.6]),
    ]
    shown = headlines_table([(claim, "make") for claim in claims]).splitlines()[2:]
    assert [line.split(" | ")[1] for line in shown] == [HEADLINES[0][1], what]
    assert shown[0].endswith("| 1.5 x [1.4 .. 1.6] | 1.3 .. 1.7 | >= 1.2: met |")
    assert " | trained | " in shown[1]
    every = claims_table([(claim, "make") for claim in claims])
    assert "something else" in every
    text = "<!-- claims -->\n<!-- /claims -->\n<!-- claims all -->\n<!-- /claims -->\n"
    (tmp_path / "planner.json").write_bytes(
        msgspec.json.encode(Result("planner", "make", {}, [], claims=claims))
    )
    filled = fill_in(text, tmp_path)[0]
    assert filled.count("something else") == 1
    assert fill_in(filled, tmp_path)[0] == filled


def test_a_section_without_a_run_is_left_and_named(tmp_path: Path) -> None:
    assert fill_in(PAGE, tmp_path) == (PAGE, [], ["planner"])


def test_every_benchmark_has_its_sections_once() -> None:
    text = "".join((Path(__file__).parents[2] / page).read_text() for page in PAGES)
    found = [*SECTION.finditer(text)]
    sections = [match[2] for match in found if not match[3]]
    assert len(set(sections)) == len(sections)
    assert {match[2] for match in found if match[3]} <= set(sections)  # parts of it elsewhere
    assert {section.partition("-")[0] for section in sections} == set(BENCHES)


@pytest.mark.slow
def test_the_planner_bench_measures_every_situation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "planner.json"
    arguments = ["--requests", "2", "--tokens", "256", "--steps", "4", "--json", str(path)]
    assert main(["planner", *arguments]) == 0
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert [row["scenario"] for row in result.raw] == [s.name for s in SCENARIOS]
    assert all(row["total"] > 0 for row in result.raw)
    assert as_text(result) in capsys.readouterr().out


def test_a_sample_counts_every_held_block_in_one_of_four_bins() -> None:
    decoding = Decoding(3, 96, {"policy": {"name": "random"}, "reclamation": "off"})
    decoding.configure({"budget_tokens": 48, "interval_tokens": 0})
    decoding.steps(3)
    found = sample(decoding.runtime)
    assert found is not None
    assert len(found["bins"]) == BINS
    assert sum(found["bins"]) == found["used"] == found["held"]
    assert found["bins"][-1] < found["used"]  # some blocks are not full
    full = Decoding(1, 64, {"policy": {"name": "none"}})
    full.steps(16)
    assert sample(full.runtime)["bins"] == [0, 0, 0, 5]  # type: ignore[index]


def test_a_summary_weighs_requests_and_blocks_alike_in_every_step() -> None:
    one = {
        "requests": 1,
        "held": 6,
        "bound": 3,
        "used": 6,
        "live": 40,
        "f": 0.5,
        "bins": [2, 4, 0, 0],
    }
    two = {
        "requests": 3,
        "held": 6,
        "bound": 6,
        "used": 6,
        "live": 90,
        "f": 0.1,
        "bins": [0, 0, 0, 6],
    }
    found = summary([one, two])
    assert found["blocks_per_request"] == 3.0
    assert found["peak_blocks_per_request"] == 6.0
    assert found["over_bound_ratio"] == pytest.approx(1 / 3)
    assert found["bins_ratio"] == [2 / 12, 4 / 12, 0, 0.5]
    with pytest.raises(ValueError, match="nothing was sampled"):
        summary([])


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


def rounds(*ratios: float, instructions: float | None = None) -> Rounds:
    one = {"p50_ms": 10.0, "instructions": instructions}
    return [{"a": one | {"p50_ms": 10.0 * ratio}, "b": one} for ratio in ratios]


def test_a_ratio_whose_spread_exceeds_its_effect_is_shown_as_such() -> None:
    noisy = compare(rounds(0.9, 1.02, 1.1), "a", "b", "p50_ms")
    clear = compare(rounds(1.5, 1.51, 1.52), "a", "b", "p50_ms")
    assert noisy is not None
    assert clear is not None
    assert not noisy.resolved
    assert clear.resolved
    assert str(noisy).startswith("≈ 1.020 [0.92")
    assert str(clear) == "1.510 [1.50 .. 1.52]"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0] * 20, "met"),
        ([1.3] * 20, "missed"),
        ([1.0, 1.3] * 10, "not decided"),  # the median may be on either side of the goal
        ([1.0], "not decided"),  # one round gives no interval
    ],
)
def test_a_goal_is_decided_by_the_confidence_interval_of_the_median(
    ratios: list[float], verdict: str
) -> None:
    found = compare(rounds(*ratios), "a", "b", "p50_ms")
    assert found is not None
    assert found.verdict(1.1) == verdict


def slices_of(group: str, instructions: int | None) -> Run:
    """Twenty rounds in which every variant takes a tenth more than the one before it."""
    found = {}
    for i, variant in enumerate(GROUPS[group]):
        reply = {
            "steps_ms": [10.0 + i, 10.0 + i, 13.0 + i],
            "cpu_seconds": 0.03 * (1 + i / 10),
            "instructions": instructions,
            "tokens": 24,
            "hook_seconds": {"scheduler": 3e-4, "worker": 6e-4},
        }
        found[variant.name] = step_metrics(reply)
    return Run("demo", 8, group, [found] * 20)


def test_overhead_is_shown_against_stock_and_its_goals() -> None:
    run = slices_of("indirection", None)
    table = ratios_table(run)
    assert "instructions a step" not in table.columns
    cells = dict(zip(table.columns, table.rows[-1], strict=True))
    assert cells["variant, against"] == "recycling"
    assert cells["step p50"] == "1.500 [1.50 .. 1.50]"
    assert cells["µs, scheduler"] == pytest.approx(100)
    goals = goals_table([run])
    assert {claim.what.split(",")[0] for claim in claims([run])} == {
        "plugin idle",
        "indirection",
        "recycling",
    }
    assert [row[-1] for row in goals.rows] == ["missed"] * 3
    assert goals.rows[-1][1:4] == ["demo, 8", 1.24, "1.05"]


def test_instructions_are_shown_where_they_are_counted() -> None:
    table = ratios_table(slices_of("eviction", 6_000))
    assert "instructions a step" in table.columns
    naive = [row[0] for row in table.rows if "naive" in str(row[0])]
    assert naive == ["h2o, naive-evict (holes), against h2o, dense, one layer probed"]
    assert goals_table([slices_of("eviction", 6_000)]).rows == []  # those are of a trained model


def test_uncounted_instructions_give_no_ratio() -> None:
    assert compare(rounds(1.0), "a", "b", "instructions") is None
    counted = compare(rounds(1.0, instructions=5.0), "a", "b", "instructions")
    assert counted is not None
    assert counted.ratio == 1.0


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


def test_bytes_are_those_of_real_arrays_and_each_counts_once() -> None:
    array = np.zeros(10_000, dtype=np.int64)
    assert 80_000 < deep_bytes([{"a": array, "b": [array], "view": array[5:10]}]) < 81_000
    assert 80_000 < deep_bytes([array[5:10]]) < 81_000
    assert deep_bytes([{"a": array}], excluded=[[array]]) < 1_000
    assert deep_bytes([{"a": [array]}], ends=[array]) < 1_000
    holder = {"a": array, "b": [1]}
    assert 80_000 < deep_bytes([{"c": holder, "d": array}], ends=[holder]) < 81_000


def test_bytes_of_tensors_are_those_of_their_storage_once() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(10_000, dtype=torch.int64)
    assert 80_000 < deep_bytes([tensor, tensor[5:10]]) < 81_000
    assert deep_bytes([tensor[5:10]], excluded=[tensor]) < 1_000


def test_growth_skips_sizes_that_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    sizes = ["--requests", "2", "4", "--tokens", "256", "1048576", "--memory-gb", "0.05"]
    sizes += ["--base", "2", "256", "--pools", "1", "3", "--block-sizes", "16", "32"]
    assert main(["growth", *sizes, "--steps", "4", "--json", str(path)]) == 0
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    cells = {tuple(cell["size"].values()): cell for cell in result.raw["cells"]}
    assert set(cells) == {
        (2, 256, 16, 1), (2, 256, 16, 3), (2, 256, 32, 1), (4, 256, 16, 1),
        (2, 1_048_576, 16, 1), (4, 1_048_576, 16, 1),
    }  # fmt: skip
    small, large = cells[2, 256, 16, 1], cells[2, 1_048_576, 16, 1]
    assert set(small["us"]) == set(MEASURED)
    assert all(s["p10"] <= s["median"] <= s["p90"] for s in small["us"].values())
    assert small["table_bytes"] > 4
    assert small["mirror_bytes"] > 4
    assert cells[2, 256, 16, 3]["table_bytes"] > small["table_bytes"] + 2 * 2
    assert large["skipped"]
    assert "left out" in as_text(result)
    axes = {panel.x_label: panel.lines[0].x for panel in result.charts[0].panels}
    assert list(axes.values()) == [[2, 4], [256], [1, 3], [16, 32]]


def test_the_gpu_table_is_calculated_from_the_measured_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(growth, "GPU_REQUESTS", 2)
    monkeypatch.setattr(growth, "GPU_TOKENS", 256)
    path = tmp_path / "growth.json"
    sizes = ["--requests", "2", "--tokens", "256", "--base", "2", "256"]
    arguments = [*sizes, "--pools", "1", "--block-sizes", "16", "--steps", "4"]
    assert main(["growth", *arguments, "--json", str(path)]) == 0
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    table = result.tables[-1]
    assert table.title.startswith("Calculated, not measured")
    (cell,) = result.raw["cells"]
    for row, steps in zip(table.rows, cell["us"].values(), strict=False):
        assert row[1] == f"{steps['median']:,.0f} µs a step"
        assert row[2] == f"{100 * steps['median'] / 10_000:.1f}"
        assert row[3] == f"{100 * steps['median'] / 30_000:.1f}"
    assert table.rows[3][1] == f"{cell['table_bytes'] * 512 / 1e6:,.0f} MB"


def test_a_round_of_evictions_is_spread_over_its_steps() -> None:
    engine = rounds_of_evictions("h2o", 64, 256)
    evicted = []
    for _ in range(PERIOD):
        before = engine.runtime.counters.tokens.evicted
        engine.step(engine.ids)
        evicted.append(engine.runtime.counters.tokens.evicted - before)
    assert sum(evicted) == 64 * PERIOD
    assert max(evicted) <= 4 * PERIOD
