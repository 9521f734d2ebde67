"""The evaluation without an engine: lengths, points, what is made of runs, and what is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtoken.core.config.values import default_config, merge_patch
from vtoken.wire import ConfigValues
from vtoken_bench.claims import Claim, student_interval
from vtoken_bench.code import commit
from vtoken_bench.evaluation.command import PARTS, is_new, repeats_of
from vtoken_bench.evaluation.effects import (
    paired,
    speed,
    spread,
    unpacked_speed,
)
from vtoken_bench.evaluation.points import Comparison, EngineSpec, Point, Run, Setting, stamp
from vtoken_bench.evaluation.prose import Prose, set_arrivals
from vtoken_bench.evaluation.running import measure
from vtoken_bench.evaluation.variants import NATIVE, NEUTRAL, VARIANTS, configuration
from vtoken_bench.log import Log
from vtoken_bench.target import ModelShape, Target, TargetError, model_folder

SETTINGS = [
    Setting("demo", 32, quick=False, repeats=3),
    Setting("demo", 32, quick=True, repeats=1),
    Setting("llama-8b", 16, quick=False, repeats=3),
]


def run(labels: Mapping[str, str | int | float], repeat: int = 0, **figures: Any) -> Run:
    return Run(labels, repeat, figures)


def test_another_repeat_has_other_text() -> None:
    folder = model_folder("demo")
    once, again, other = (Prose(64, 8).requests(folder, 3, seed) for seed in (0, 0, 1))
    assert once == again
    assert once != other
    assert {(len(request["prompt"]), request["num_new"]) for request in once} == {(64, 8)}


def test_poisson_arrivals_come_at_the_rate() -> None:
    found = Prose(32, 8).requests(model_folder("demo"), 2000, 0)
    set_arrivals(found, 4.0, 0)
    arrivals = [request["arrival_s"] for request in found]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("setting", SETTINGS, ids=["tiny", "quick", "gpu"])
def test_every_point_is_a_valid_configuration_of_one_workload(name: str, setting: Setting) -> None:
    """Each comparison's points have the same workload, and each patch is one the engine takes."""
    for comparison in PARTS[name].comparisons(setting):
        keys = [str(point.key(0)) for point in comparison.points]
        assert len(set(keys)) == len(keys)
        for point in comparison.points:
            assert point.workload.longest() <= point.engine.max_model_len
            if point.engine.stock:
                assert point.config == {}
                continue
            blocks = point.engine.num_blocks
            patch = configuration(point.config, blocks)
            merge_patch(default_config(blocks), patch, num_blocks=blocks, num_layers=4)


def test_a_variant_sets_back_what_the_one_before_it_had_set() -> None:
    touched = {field for patch in VARIANTS.values() for field in patch}
    assert touched <= set(NEUTRAL)
    assert set(NEUTRAL) <= set(ConfigValues.__struct_fields__)
    defaults = default_config(256)
    patch = configuration({}, 256)
    assert patch.pop("interval_tokens") == 16  # outputs are short: the default would end no phase
    assert patch.pop("evict_when") == "always"  # the paper's form
    merged = merge_patch(defaults, patch, num_blocks=256, num_layers=4)
    assert merged == defaults


def test_ratios_are_of_the_same_repeat() -> None:
    runs = [
        run({"variant": "a"}, 0, tokens=20, seconds=1.0),
        run({"variant": "b"}, 0, tokens=10, seconds=1.0),
        run({"variant": "a"}, 1, tokens=20, seconds=10.0),
        run({"variant": "b"}, 1, tokens=10, seconds=10.0),
    ]
    assert paired(runs, speed, {"variant": "a"}, {"variant": "b"}) == [2.0, 2.0]
    assert spread([1.0, 3.0, 2.0]) == "2.00 [1.00 .. 3.00]"
    assert spread([150.0, 150.0]) == "150"


@pytest.mark.parametrize(
    ("values", "goal", "verdict"),
    [
        ([1.45, 1.51, 1.60], ">= 1.5", "undecided"),
        ([1.26, 1.27, 1.30], ">= 1.5", "missed"),
        ([1.49, 1.51, 1.62], ">= 1.3", "met"),
        ([2.0, 2.1, 2.2], "<= 3", "met"),
        ([17.0, 27.0, 37.0], "<= 3", "undecided"),  # the interval is wider than the range
        ([26.0, 27.0, 28.0], "<= 3", "missed"),
        ([2.0, 2.1], "<= 3", ""),  # two repeats give no interval
        ([2.0, 2.1, 2.2], "", ""),
    ],
)
def test_a_goal_is_decided_by_the_side_of_the_whole_interval(
    values: list[float], goal: str, verdict: str
) -> None:
    claim = Claim.of("Goodput", "throughput", "demo", values, "x", goal=goal)
    assert claim.verdict() == verdict


def test_the_interval_is_students_of_the_mean() -> None:
    # scipy.stats.t.interval(0.95, 2, loc=2, scale=sem([1, 2, 3]))
    assert student_interval([1.0, 2.0, 3.0]) == pytest.approx((-0.4841, 4.4841), abs=1e-3)
    assert student_interval([1.0, 2.0]) is None


def test_repeats_are_those_that_ran() -> None:
    ran = [("demo", "a", 0), ("demo", "a", 1), ("demo", "b", 0), ("trained", "a", 0)]
    raw = [{"model": model, "labels": {"name": name}, "repeat": n} for model, name, n in ran]
    assert repeats_of(raw) == "demo 1 to 2, trained 1"


def test_packing_is_taken_out_of_the_time() -> None:
    busy = {"tokens": 15, "seconds": 2.0}
    packed = run({}, busy=busy, seconds=4.0, pack_us=1_000_000)
    assert unpacked_speed(packed) == pytest.approx(10.0)
    assert unpacked_speed(run({}, busy=busy, seconds=4.0)) == pytest.approx(7.5)


class FakeEngines:
    """Counts what it is asked for; fails once `fails_at` loads are done."""

    def __init__(self, fails_at: int = 1000, most_together: int = 1) -> None:
        self.loads: list[tuple[str, int]] = []
        self.key: dict[str, Any] = {"device": "cpu"}
        self.most_together = most_together
        self.turns: list[str] = []  # the loads of each call
        self._fails_at = fails_at

    def together(self, points: Sequence[Point], repeat: int) -> list[dict[str, Any]]:
        self.turns.append("".join(str(point.labels["variant"]) for point in points))
        found = []
        for point in points:
            if len(self.loads) == self._fails_at:
                raise KeyboardInterrupt
            self.loads.append((str(point.labels["variant"]), repeat))
            found.append({"tokens": len(self.loads)})
        return found


def points() -> list[Point]:
    spec = EngineSpec("demo", False, 32, 64, 256)
    return [Point({"variant": name}, spec, {}, Prose(64, 8), 2, concurrency=2) for name in "ABC"]


def test_repeats_are_interleaved_forwards_and_backwards(tmp_path: Path) -> None:
    engines = FakeEngines()
    measure([Comparison("c", points(), 3)], Log(tmp_path / "log.jsonl"), engines, "t")
    assert "".join(name for name, _ in engines.loads) == "ABCCBAABC"


def test_loads_take_turns_where_their_engines_fit_and_are_kept_all_or_none(
    tmp_path: Path,
) -> None:
    comparison, path = Comparison("c", points(), 2), tmp_path / "log.jsonl"
    engines = FakeEngines(fails_at=5, most_together=3)
    with pytest.raises(KeyboardInterrupt):
        measure([comparison], Log(path), engines, "t")
    rest = FakeEngines(most_together=3)
    runs = measure([comparison], Log(path), rest, "t")
    assert engines.turns == ["ABC", "CBA"]
    assert rest.turns == ["CBA"]
    assert [(r.labels["variant"], r.repeat) for r in runs] == [
        *[(name, 0) for name in "ABC"],
        *[(name, 1) for name in "CBA"],
    ]
    many = FakeEngines(most_together=2)
    measure([comparison], Log(tmp_path / "many.jsonl"), many, "t")
    assert many.turns == [*"ABCCBA"]


def test_comparisons_go_repeat_by_repeat(tmp_path: Path) -> None:
    engines = FakeEngines()
    both = [
        Comparison(
            name,
            [replace(point, labels={**point.labels, "pool": name}) for point in points()[:2]],
            2,
        )
        for name in ("one", "other")
    ]
    runs = measure(both, Log(tmp_path / "log.jsonl"), engines, "t")
    assert [repeat for _, repeat in engines.loads] == [0] * 4 + [1] * 4
    assert [run.repeat for run in runs] == [0] * 4 + [1] * 4


def test_an_interrupted_part_goes_on_where_it_stopped(tmp_path: Path) -> None:
    comparison, path = Comparison("c", points(), 2), tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure([comparison], Log(path), FakeEngines(fails_at=2), "t")
    rest = FakeEngines()
    runs = measure([comparison], Log(path), rest, "t")
    assert len(rest.loads) == 4
    assert [r.labels["variant"] for r in runs] == list("ABCCBA")


def test_a_measurement_of_other_code_is_not_used_again(tmp_path: Path) -> None:
    comparison, path = Comparison("c", points(), 1), tmp_path / "log.jsonl"
    measure([comparison], Log(path, "one"), FakeEngines(), "t")
    again, other = FakeEngines(), FakeEngines()
    measure([comparison], Log(path, "one"), again, "t")
    runs = measure([comparison], Log(path, "two"), other, "t")
    assert (len(again.loads), len(other.loads)) == (0, 3)
    assert stamp(runs) == f"{runs[0].at} at {commit()}" or " to " in stamp(runs)


def test_repeats_may_begin_later(tmp_path: Path) -> None:
    engines = FakeEngines()
    comparison = Comparison("c", points(), 3, first=2)
    measure([comparison], Log(tmp_path / "log.jsonl"), engines, "t")
    assert engines.loads == [("A", 2), ("B", 2), ("C", 2)]


def test_what_is_measured_next_is_new() -> None:
    comparison = Comparison("c", points(), 2)
    ran = [Run(point.labels, repeat, {}) for point in points() for repeat in (0, 1)]
    assert is_new(comparison, ran[:-1])
    assert not is_new(comparison, ran)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no config\.json"):
        ModelShape.of(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ([], 1),
        (["full_attention"] * 18, 1),
        ((["sliding_attention"] * 5 + ["full_attention"]) * 3, 6),  # vLLM's, of Gemma 3 270M
        (["sliding_attention"] * 3 + ["full_attention"] * 2, 3),
    ],
)
def test_every_group_of_layers_gets_its_blocks(
    kinds: list[str], groups: int, tmp_path: Path
) -> None:
    config = {"num_hidden_layers": 18, "num_key_value_heads": 1, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": kinds}))
    assert ModelShape.of(tmp_path) == ModelShape(18, 1, 8, groups)
    args = Target().engine_args(tmp_path, block_size=16, max_model_len=99, num_blocks=50)
    assert args["num_gpu_blocks_override"] == 50 * groups + 1


def test_native_is_stock_in_every_comparison_that_has_it() -> None:
    for part in PARTS.values():
        for comparison in part.comparisons(SETTINGS[0]):
            for point in comparison.points:
                if str(point.labels["variant"]).startswith(NATIVE):
                    assert point.engine.stock
