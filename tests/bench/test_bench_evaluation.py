"""The evaluation without an engine: lengths, points, what is made of runs, and what is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtoken.core.config.values import default_config, merge_patch
from vtoken.wire import ConfigValues
from vtoken_bench.code import commit
from vtoken_bench.evaluation import capacity, frontier, memory, relocation, stability
from vtoken_bench.evaluation.command import EXPERIMENTS, is_new, repeats_of
from vtoken_bench.evaluation.points import (
    Comparison,
    EngineSpec,
    Point,
    Run,
    Setting,
    busy_speed,
    ratios,
    speed,
    spread,
    stamp,
    unpacked,
)
from vtoken_bench.evaluation.running import measure
from vtoken_bench.evaluation.variants import (
    DEFAULTS,
    NAIVE,
    NATIVE,
    NEUTRAL,
    PAPER,
    VARIANTS,
    configuration,
)
from vtoken_bench.evaluation.workloads import Workload, budget_tokens, requests, set_arrivals
from vtoken_bench.log import Log
from vtoken_bench.output import new_result
from vtoken_bench.target import ModelShape, TargetError, model_folder
from vtoken_bench.texts import token_ids

SETTINGS = [
    Setting("demo", 32, slow=False, quick=False, repeats=3),
    Setting("trained", 32, slow=True, quick=False, repeats=3),
    Setting("demo", 32, slow=False, quick=True, repeats=1),
    Setting("llama-8b", 16, slow=False, quick=False, repeats=3, on_gpu=True),
]


def run(labels: Mapping[str, str | int | float], repeat: int = 0, **figures: Any) -> Run:
    return Run(labels, repeat, figures)


@pytest.mark.parametrize("name", ["chat", "long-context"])
def test_a_file_of_lengths_names_its_source_and_scales(name: str) -> None:
    folder = Path(__file__).parents[2] / "bench/vtoken_bench/evaluation/lengths"
    text = (folder / f"{name}.csv").read_text()
    assert text.startswith("# ")
    assert "github.com/" in text
    whole, half = (Workload(name, name, scale, scale).sizes(8, 0) for scale in (1.0, 0.5))
    assert all(abs(h[0] - w[0] / 2) <= 32 for w, h in zip(whole, half, strict=True))
    cut = Workload(name, name, longest_tokens=512).sizes(50, 0)
    assert max(map(sum, cut)) == 512
    assert all(prompt > 0 and output > 0 for prompt, output in cut)


def test_another_repeat_has_other_lengths_and_other_text() -> None:
    workload = Workload("chat", "chat", 1 / 8, 1 / 2, 1024)
    assert workload.sizes(16, 0) != workload.sizes(16, 1)
    folder = model_folder("demo")
    once, again, other = (requests(folder, [(64, 8)] * 3, seed, keep=0.5) for seed in (0, 0, 1))
    assert once == again
    assert once != other
    assert once[0]["arguments"] == {"vtoken_budget_tokens": budget_tokens(64, 8, 0.5)}


def test_requests_of_a_group_share_their_beginning_and_nothing_else() -> None:
    found = requests(model_folder("demo"), [(64, 8)] * 4, 0, keep=None, shared=(2, 32))
    prompts = [request["prompt"] for request in found]
    assert prompts[0][:32] == prompts[1][:32] != prompts[2][:32] == prompts[3][:32]
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 4
    assert "arguments" not in found[0]


def test_poisson_arrivals_come_at_the_rate() -> None:
    found = requests(model_folder("demo"), [(32, 8)] * 2000, 0, keep=None)
    set_arrivals(found, 4.0, 0)
    arrivals = [request["arrival_s"] for request in found]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(500, rel=0.1)


def test_a_reference_is_the_text_behind_its_prompt() -> None:
    model = model_folder("demo")
    text = token_ids(model)
    for request in requests(model, [(64, 8)] * 3, 0, keep=None, continues=True):
        whole = request["prompt"] + request["reference"]
        assert len(whole) == 72
        assert any(text[at : at + 72] == whole for at in range(len(text) - 71))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("setting", SETTINGS, ids=["tiny", "trained", "quick", "gpu"])
def test_every_point_is_a_valid_configuration_of_one_workload(name: str, setting: Setting) -> None:
    """Each comparison's points have the same workload, and each patch is one the engine takes."""
    for comparison in EXPERIMENTS[name].comparisons(setting):
        keys = [str(point.key(0)) for point in comparison.points]
        assert len(set(keys)) == len(keys)
        for point in comparison.points:
            assert max(map(sum, point.workload.sizes(96, 0))) <= point.engine.max_model_len
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
    found = ratios(runs, speed, {"variant": "a"}, {"variant": "b"})
    assert found is not None
    assert (found.low, found.median, found.high, found.count) == (2.0, 2.0, 2.0, 2)
    assert str(spread([1.0, 3.0, 2.0])) == "2.00 [1.00 .. 3.00]"


def test_the_best_concurrency_is_the_fastest_within_the_bound() -> None:
    runs = [
        run({"clients": c}, tokens=tokens, seconds=1.0, itl_ms={"p95": p95})
        for c, tokens, p95 in ((4, 10, 1.0), (8, 20, 2.0), (16, 30, 3.0))
    ]
    assert frontier.best_under(runs, 2.5) == (8, 20.0)
    assert frontier.best_under(runs, 0.5) is None


def test_points_within_the_bound_are_compared_repeat_by_repeat() -> None:
    """By variant and clients: seconds, packing in seconds, p95 between tokens in ms."""
    points = {
        ("native", 4): (3.0, 0.0, 8.0),
        ("native", 8): (2.0, 0.0, 10.0),
        ("native", 16): (1.0, 0.0, 30.0),  # faster, and beyond 1.05 times 20
        ("naive-evict", 4): (5.0, 0.0, 15.0),
        ("naive-evict", 8): (4.0, 2.0, 20.0),
        ("naive-evict", 16): (3.0, 2.0, 25.0),
        ("vToken", 4): (4.0, 0.5, 15.0),
        ("vToken", 8): (2.0, 0.5, 20.5),
        ("vToken", 16): (1.6, 0.4, 21.0),
    }
    runs = [
        run(
            {"workload": "chat", "clients": clients, "variant": variant}
            | ({} if variant == "native" else {"policy": "h2o"}),
            repeat,
            tokens=12,
            seconds=seconds * slowness,
            pack_us=1e6 * packing * slowness,
            itl_ms={"p95": p95},
            e2e_ms={"p95": 1000.0},
            overflowed=False,
            memory={"f": 0.3, "bins_ratio": [0.1, 0.2, 0.3, 0.4]},
        )
        for (variant, clients), (seconds, packing, p95) in points.items()
        for repeat, slowness in enumerate((1.0, 3.0, 7.0))
    ]
    result = new_result("evaluation-frontier", "the command", {})
    frontier.report(result, "demo", runs)
    (table,) = (table for table in result.tables if "within" in table.title)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["chat, h2o, native"] == [
        21.0,
        8,
        2.0,
        "2.00 [2.00 .. 2.00]",
        "1.00 [1.00 .. 1.00]",
        None,
    ]
    assert rows["chat, h2o, naive-evict"][1:] == [8, 1.0, None, None, "0.50 [0.50 .. 0.50]"]
    assert rows["chat, h2o, vToken"][1] == 16
    claims = {claim.what: claim.value for claim in result.claims}
    assert claims == {
        "chat, h2o: throughput under the bound of naive-evict, vToken": pytest.approx(2.5),
        "chat, h2o: throughput under the bound of naive-evict, packing taken out, vToken": (
            pytest.approx(10.0 / 6.0)
        ),
        "chat, h2o: throughput under the bound of native, vToken": pytest.approx(1.25),
    }


@pytest.mark.parametrize("truth", range(13))
def test_bisection_finds_the_largest_concurrency_and_tries_its_neighbours(truth: int) -> None:
    fits: dict[int, bool] = {}
    while (count := capacity.next_count(fits, 12)) is not None:
        assert count not in fits
        fits[count] = count <= truth
    assert len(fits) <= 7  # of 12
    assert max((c for c, fit in fits.items() if fit), default=0) == truth
    assert {truth - 1, truth, truth + 1, truth + 2} & set(range(1, 13)) <= set(fits)


def test_what_fits_above_a_gap_does_not_count_and_is_named() -> None:
    fits: dict[int, bool] = {}
    while (count := capacity.next_count(fits, 12)) is not None:
        fits[count] = count in (1, 2, 3, 4, 5, 6, 8)
    runs = [run({"concurrency": c}, overflowed=not fit) for c, fit in fits.items()]
    assert capacity.largest(runs) == 6
    assert not capacity.is_monotone(runs)
    assert capacity.is_monotone([r for r in runs if r.labels["concurrency"] != 8])


def test_each_process_bisects_in_the_pool_that_its_own_memory_leaves() -> None:
    setting = SETTINGS[0]
    full, packed = capacity.blocks_each(setting)
    blocks = capacity.pools(setting)
    own = {"tables": 10.0, "mirrors": 20.0, "buffers": 75.0, "block": 50.0}  # 2.1 blocks
    runs = [run(point.labels, own_bytes=own) for point in capacity.comparisons(setting)[0].points]
    ran: list[tuple[int, str, int]] = []
    while more := capacity.bisection(setting, runs):
        (comparison,) = more
        for point in comparison.points:
            repeat, variant = comparison.first, str(point.labels["variant"])
            pool, footprint = point.engine.num_blocks, full if variant == NATIVE else packed
            assert pool == blocks[str(point.labels["pool"])] - (0 if variant == NATIVE else 3)
            assert point.engine.copy == repeat
            count = int(point.labels["concurrency"])
            runs.append(run(point.labels, repeat, overflowed=count * footprint > pool))
            ran.append((repeat, variant, count))
    assert [repeat for repeat, *_ in ran] == sorted(repeat for repeat, *_ in ran)
    for variant, footprint in ((NATIVE, full), (DEFAULTS, packed)):
        for pool, size in blocks.items():
            chosen = [
                r
                for r in runs
                if r.repeat == 2
                and r.labels["variant"] == variant
                and r.labels["pool"] == pool
                and r.labels["kind"] == capacity.FIXED
            ]
            free = size - (0 if variant == NATIVE else 3)
            assert capacity.largest(chosen) == free // footprint


def test_the_largest_concurrency_ends_at_the_first_that_does_not_fit() -> None:
    runs = [
        run({"concurrency": c}, overflowed=overflowed)
        for c, overflowed in ((12, False), (4, False), (8, False), (10, True))
    ]
    assert capacity.largest(runs) == 8
    assert capacity.largest(runs[-1:]) == 0


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
    claim = spread(values).claim("Goodput", "throughput", "demo", "x", "", goal)
    assert claim.verdict() == verdict


def test_the_interval_is_students_of_the_mean() -> None:
    # scipy.stats.t.interval(0.95, 2, loc=2, scale=sem([1, 2, 3]))
    assert spread([1.0, 2.0, 3.0]).interval() == pytest.approx((-0.4841, 4.4841), abs=1e-3)
    assert spread([1.0, 2.0]).interval() is None


def test_repeats_are_those_that_ran() -> None:
    ran = [("demo", "a", 0), ("demo", "a", 1), ("demo", "b", 0), ("trained", "a", 0)]
    raw = [{"model": model, "labels": {"name": name}, "repeat": n} for model, name, n in ran]
    assert repeats_of(raw) == "demo 1 to 2, trained 1"


def test_packing_is_taken_out_of_the_time() -> None:
    busy = {"tokens": 15, "seconds": 2.0}
    packed = run({}, busy=busy, seconds=4.0, pack_us=1_000_000)
    assert unpacked(busy_speed)(packed) == pytest.approx(10.0)
    assert unpacked(busy_speed)(run({}, busy=busy, seconds=4.0)) == pytest.approx(7.5)


def held(variant: str, blocks: float, f: float, tokens: str) -> Run:
    memory = {
        "blocks_per_request": blocks,
        "f": f,
        "over_bound_ratio": blocks / 10 - 1,
        "bins_ratio": [0.25, 0.5, 0.25, 0.0],
    }
    labels = {"workload": "chat", "policy": "h2o", "variant": variant}
    return run(labels, memory=memory, moved_tokens=5, tokens_hash=tokens)


def test_memory_claims_are_against_naive_evict_of_the_same_repeat() -> None:
    result = new_result("evaluation-memory", "make bench-evaluation", {})
    memory.report(result, "demo", [held(NAIVE, 20.0, 0.5, "x"), held(DEFAULTS, 10.0, 0.1, "y")])
    claims = {claim.what: claim.value for claim in result.claims}
    assert claims["blocks at most half full, naive-evict, chat"] == 75.0
    assert claims[f"utilisation over naive-evict, chat, {DEFAULTS}, mean"] == pytest.approx(40.0)
    assert claims[f"blocks against naive-evict, chat, {DEFAULTS}"] == pytest.approx(-50.0)
    row = result.tables[0].rows[-1]
    assert row[0] == f"h2o, {DEFAULTS}"
    assert row[-1] == "no"  # other tokens than naive-evict's


def reclaiming(variant: str, seconds: float, moved_tokens: int, copy_us: int) -> Run:
    return run(
        {"clients": 8, "variant": variant},
        steps=100,
        seconds=seconds,
        tokens=800,
        plan_us=2_000,
        copy_us=copy_us,
        pack_us=1_000,
        hook_seconds={"scheduler": 0.005, "worker": 0.010},
        step_ms={"p50": 8.0},
        itl_ms={"p95": 10.0 * seconds},
        relocations=moved_tokens // 4,
        moved_tokens=moved_tokens,
        block_size=32,
    )


def test_the_cost_of_reclaiming_is_shown_by_part_and_by_copied_token() -> None:
    result = new_result("evaluation-relocation", "make bench-evaluation", {})
    runs = [reclaiming(NAIVE, 2.0, 0, 0), reclaiming(PAPER, 1.0, 200, 4_000)]
    relocation.report(result, "demo", runs)
    parts, copies = result.tables
    assert parts.rows == [
        [f"8, {NAIVE}", "8.00", "20.0", "0.00", "10.0", "30.0", "100", "0.80"],
        [f"8, {PAPER}", "8.00", "20.0", "40.0", "10.0", "30.0", "60.0", "1.60"],
    ]
    assert copies.rows == [
        [f"8, {NAIVE}", "0.00", "0.00", None, None, None, None, None],
        [f"8, {PAPER}", "50.0", "200", "20.0", "640", "2.00", "2.00", "0.50"],
    ]
    assert {claim.what: claim.value for claim in result.claims} == {
        f"8, {PAPER}: tok/s against naive-evict": 2.0,
        f"8, {PAPER}: tok/s against naive-evict, packing taken out": (
            pytest.approx(800 / (1.0 - 0.001) / (800 / (2.0 - 0.001)))
        ),
        f"8, {PAPER}: p95 between tokens against naive-evict": 0.5,
    }
    assert [len(panel.bars) for panel in result.charts[0].panels] == [5]


def outputs(variant: str, *output_ids: list[int], dtype: str = "float32") -> Run:
    labels = {"task": "continuations", "dtype": dtype, "policy": "tova", "variant": variant}
    references = [[1, 2, 3, 4]] * len(output_ids)
    return run(labels, output_ids=[*output_ids], reference_ids=references)


def test_the_difference_of_scores_has_its_sign_and_is_of_vtoken_less_naive_evict() -> None:
    same, half = [1, 2, 3, 4], [1, 2, 9, 9]  # scores of 1 and 0.5
    result = new_result("evaluation-stability", "make bench-evaluation", {})
    naive, vtoken = outputs(NAIVE, same, same, half), outputs(DEFAULTS, same, half, [1, 2])
    stability.report(result, "trained", [naive, vtoken])
    claims = {claim.what.partition(",")[0]: claim for claim in result.claims}
    assert claims["difference of scores"].value == pytest.approx((0 - 0.5 + (2 / 3 - 0.5)) / 3)
    assert claims["differences at most 0.01"].value == pytest.approx(100 / 3)
    # of 1 in 3: low = 1 - 0.975 ** (1 / 3), and (1 - p) ** 3 + 3 * p * (1 - p) ** 2 = 0.025 at high
    assert claims["differences at most 0.01"].interval == pytest.approx((0.840, 90.57), abs=0.01)
    assert claims["length ratio"].value == 1.0
    (row,) = result.tables[-1].rows
    assert row[:4] == [f"float32, {DEFAULTS}", NAIVE, 3, "33.3 [1 .. 91]"]


def test_runs_without_reclamation_are_compared_but_are_no_claims() -> None:
    result = new_result("evaluation-stability", "make bench-evaluation", {})
    names = (NATIVE, stability.NATIVE_FEWER, stability.NATIVE_THREADS, NAIVE)
    runs = [outputs(name, [1, 2], [3, 4], dtype="bfloat16") for name in names]
    stability.report(result, "trained", runs)
    assert [row[1] for row in result.tables[-1].rows] == [NATIVE] * 3
    assert result.claims == []


def test_scores_are_of_a_variant_that_relocates_too_and_claims_only_what_was_read_back() -> None:
    setting = Setting("trained", 32, slow=True, quick=False, repeats=1)
    (scores,) = stability.comparisons(setting)
    assert [p.labels["variant"] for p in scores.points] == [NAIVE, PAPER, DEFAULTS]
    result = new_result("evaluation-stability", "make bench-evaluation", {})
    runs = [outputs(name, [1, 2]) for name in (NAIVE, PAPER, DEFAULTS)]
    runs[1].figures["verified_relocations"] = 7
    runs[2].figures["recycled_slots"] = 5
    stability.report(result, "trained", runs)
    read_back = [(claim.what, claim.value) for claim in result.claims if claim.row == "I1, I2"]
    assert read_back == [
        (f"relocations read back and equal, continuations, float32, tova, {PAPER}", 7)
    ]
    assert [row[-2:] for row in result.tables[-1].rows] == [[7, 0], [0, 5]]


class FakeEngines:
    """Counts what it is asked for; fails once `fails_at` loads are done."""

    def __init__(self, fails_at: int = 1000, most_together: int = 0) -> None:
        self.loads: list[tuple[str, int]] = []
        self.key: dict[str, Any] = {"device": "cpu"}
        self.closed = 0
        self.most_together = most_together
        self.turns: list[str] = []  # the loads of each group that took turns
        self._fails_at = fails_at

    def close(self) -> None:
        self.closed += 1

    def load(self, point: Point, repeat: int) -> dict[str, Any]:
        if len(self.loads) == self._fails_at:
            raise KeyboardInterrupt
        self.loads.append((str(point.labels["variant"]), repeat))
        return {"tokens": len(self.loads)}

    def together(self, points: list[Point], repeat: int) -> list[dict[str, Any]]:
        self.turns.append("".join(str(point.labels["variant"]) for point in points))
        return [self.load(point, repeat) for point in points]


def points() -> list[Point]:
    spec = EngineSpec("demo", False, 32, 64, 256)
    workload = Workload("w", (64, 8))
    return [Point({"variant": name}, spec, {}, workload, 2, None, concurrency=2) for name in "ABC"]


def test_repeats_are_interleaved_forwards_and_backwards(tmp_path: Path) -> None:
    engines = FakeEngines()
    comparison = Comparison("c", points(), 3)
    measure([comparison], Log(tmp_path / "log.jsonl"), engines, "t")  # type: ignore[arg-type]
    assert "".join(name for name, _ in engines.loads) == "ABCCBAABC"


def test_loads_have_engines_of_their_own_where_that_is_asked_for(tmp_path: Path) -> None:
    for fresh, closed in ((False, 0), (True, 9)):
        engines = FakeEngines()
        log = Log(tmp_path / f"{fresh}.jsonl")
        comparison = Comparison("c", points(), 3, fresh=fresh)
        measure([comparison], log, engines, "t")  # type: ignore[arg-type]
        assert engines.closed == closed


def test_loads_of_speeds_take_turns_where_their_engines_fit_and_are_kept_all_or_none(
    tmp_path: Path,
) -> None:
    comparison, path = Comparison("c", points(), 2, fresh=True), tmp_path / "log.jsonl"
    engines = FakeEngines(fails_at=5, most_together=3)
    with pytest.raises(KeyboardInterrupt):
        measure([comparison], Log(path), engines, "t")  # type: ignore[arg-type]
    rest = FakeEngines(most_together=3)
    runs = measure([comparison], Log(path), rest, "t")  # type: ignore[arg-type]
    assert engines.turns == ["ABC", "CBA"]
    assert rest.turns == ["CBA"]
    assert [(r.labels["variant"], r.repeat) for r in runs] == [
        *[(name, 0) for name in "ABC"],
        *[(name, 1) for name in "CBA"],
    ]
    many = FakeEngines(most_together=2)
    measure([comparison], Log(tmp_path / "many.jsonl"), many, "t")  # type: ignore[arg-type]
    assert (many.turns, len(many.loads)) == ([], 6)


def test_comparisons_of_speeds_go_repeat_by_repeat(tmp_path: Path) -> None:
    for fresh, order in ((False, "0011" + "0011"), (True, "0000" + "1111")):
        engines = FakeEngines()
        both = [
            Comparison(
                name,
                [replace(point, labels={**point.labels, "pool": name}) for point in points()[:2]],
                2,
                fresh=fresh,
            )
            for name in ("one", "other")
        ]
        log = Log(tmp_path / f"by-{fresh}.jsonl")
        runs = measure(both, log, engines, "t")  # type: ignore[arg-type]
        assert "".join(str(repeat) for _, repeat in engines.loads) == order
        assert [run.repeat for run in runs] == [int(repeat) for repeat in order]


def test_an_interrupted_part_goes_on_where_it_stopped(tmp_path: Path) -> None:
    comparison, path = Comparison("c", points(), 2), tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure([comparison], Log(path), FakeEngines(fails_at=2), "t")  # type: ignore[arg-type]
    rest = FakeEngines()
    runs = measure([comparison], Log(path), rest, "t")  # type: ignore[arg-type]
    assert len(rest.loads) == 4
    assert [r.labels["variant"] for r in runs] == list("ABCCBA")


def test_a_measurement_of_other_code_is_not_used_again(tmp_path: Path) -> None:
    comparison, path = Comparison("c", points(), 1), tmp_path / "log.jsonl"
    measure([comparison], Log(path, "one"), FakeEngines(), "t")  # type: ignore[arg-type]
    again, other = FakeEngines(), FakeEngines()
    measure([comparison], Log(path, "one"), again, "t")  # type: ignore[arg-type]
    runs = measure([comparison], Log(path, "two"), other, "t")  # type: ignore[arg-type]
    assert (len(again.loads), len(other.loads)) == (0, 3)
    assert stamp(runs) == f"{runs[0].at} at {commit()}" or " to " in stamp(runs)


def test_repeats_may_begin_later(tmp_path: Path) -> None:
    engines = FakeEngines()
    comparison = Comparison("c", points(), 3, first=2)
    measure([comparison], Log(tmp_path / "log.jsonl"), engines, "t")  # type: ignore[arg-type]
    assert engines.loads == [("A", 2), ("B", 2), ("C", 2)]


def test_what_is_measured_next_is_new() -> None:
    comparison = Comparison("c", points(), 2)
    ran = [Run(point.labels, repeat, {}) for point in points() for repeat in (0, 1)]
    assert is_new(comparison, ran[:-1])
    assert not is_new(comparison, ran)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no config\.json"):
        ModelShape.of(tmp_path)


def test_native_is_stock_in_every_comparison_that_has_it() -> None:
    for experiment in EXPERIMENTS.values():
        for comparison in experiment.comparisons(SETTINGS[0]):
            for point in comparison.points:
                if str(point.labels["variant"]).startswith(NATIVE):
                    assert point.engine.stock
