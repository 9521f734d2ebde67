"""Benchmarks without an engine: the core's runs end to end, results land between their markers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vtoken.bench import BENCHES, main
from vtoken.bench.capacity import best_under
from vtoken.bench.output import RESULTS, SECTION, Result, Table, as_text, fill_in
from vtoken.bench.planner import SCENARIOS
from vtoken.bench.samples import summary

PAGE = "# Results\n\nprose\n\n<!-- bench:planner -->\nold\n<!-- /bench -->\n\nmore prose\n"


def saved(folder: Path, rows: list[list[str | int | float | None]]) -> Path:
    result = Result("planner", "make bench-planner", {"steps": 1}, [Table("T", ["a", "b"], rows)])
    result.machine = {"cpu": "c", "python": "3", "versions": {}}
    (folder / "planner.json").write_bytes(msgspec.json.encode(result))
    return folder


def test_a_result_replaces_what_stands_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    text, missing = fill_in(PAGE, saved(tmp_path, [["x", 1234.5], ["y", None]]))
    assert missing == []
    assert text.startswith("# Results\n\nprose\n\n<!-- bench:planner -->\n")
    assert text.endswith("<!-- /bench -->\n\nmore prose\n")
    assert "| x | 1,234 |" in text
    assert "old" not in text
    assert fill_in(text, tmp_path)[0] == text


def test_a_section_without_a_run_is_left_and_named(tmp_path: Path) -> None:
    assert fill_in(PAGE, tmp_path) == (PAGE, ["planner"])


def test_the_results_file_has_a_section_for_every_benchmark() -> None:
    text = (Path(__file__).parents[2] / RESULTS).read_text()
    assert {match[2] for match in SECTION.finditer(text)} == set(BENCHES)


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


def test_the_best_concurrency_is_the_fastest_within_the_sla() -> None:
    runs = {
        "4": {"tokens_per_second": 10.0, "gap_p95_ms": 1.0},
        "8": {"tokens_per_second": 20.0, "gap_p95_ms": 2.0},
        "16": {"tokens_per_second": 30.0, "gap_p95_ms": 3.0},
    }
    assert best_under(runs, 2.5) == (8, 20.0)
    assert best_under(runs, 0.5) is None


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
