"""`vtoken bench host`: whose a stack's time is, and the account of a few steps on the engine."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vtoken_bench import host
from vtoken_bench.evaluation.points import Run
from vtoken_bench.host import ATTENTION, BENCH, HERE, THIS, VLLM, VTOKEN, WORKER
from vtoken_bench.vllm.cpu_time import ROOTS, CPUTime, Place, place

pytestmark = pytest.mark.vllm

LOAD = {"clients": 3, "requests": 4, "prompt_tokens": 80, "new_tokens": 70, "blocks": 40}
VARIANTS = ["fixed", "h2o", "none"]


def written(owner: str, file: str, name: str, body: str) -> Any:
    """A function `name(inner)` of this file of vToken, vLLM or the benchmarks."""
    found: dict[str, Any] = {"time": time, "torch": torch}
    code = compile(f"def {name}(inner):\n    return {body}", ROOTS[owner] / file, "exec")
    exec(code, found)
    return found[name]


def nested(*frames: tuple[str, str, str]) -> Place:
    """The place of a stack of calls, the outermost first: owner, file, function."""
    call: Any = lambda _: place(sys._getframe(1))  # noqa: E731
    for owner, file, name in reversed(frames):
        call = (lambda function, inner: lambda _: function(inner))(
            written(owner, file, name, "inner(None)"), call
        )
    return call(None)  # type: ignore[no-any-return]


SCHEDULE = (VLLM, "v1/core/sched/scheduler.py", "schedule")
RUNNER = (VLLM, "v1/worker/gpu/model_runner.py", "execute_model")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([SCHEDULE], (VLLM, "scheduler", SCHEDULE[1])),
        (
            [SCHEDULE, (VTOKEN, "core/tables/pool.py", "take")],
            (VTOKEN, "scheduler", "core/tables/pool.py"),
        ),
        (
            [RUNNER, (VTOKEN, "core/tables/pool.py", "take")],
            (VTOKEN, "worker", "core/tables/pool.py"),
        ),
        (
            [(VTOKEN, "vllm/engine/scheduler.py", "schedule"), SCHEDULE],
            (VLLM, "scheduler", SCHEDULE[1]),
        ),
        (
            [(VTOKEN, "vllm/engine/scheduler.py", "schedule"), (VLLM, "v1/utils.py", "copy")],
            (VTOKEN, "scheduler", "vllm/engine/scheduler.py"),
        ),
        (
            [(BENCH, "vllm/host_engine.py", "__call__"), (VLLM, "v1/attention/x.py", "forward")],
            (VLLM, ATTENTION, "v1/attention/x.py"),
        ),
        ([(VLLM, "v1/engine/output_processor.py", "process")], (VLLM, "front end", None)),
        ([], (BENCH, "front end", None)),
    ],
    ids=[
        "vLLM's own",
        "of both sides, in the scheduler",
        "of both sides, in the worker",
        "the method that vToken extends is vLLM's",
        "a helper that vToken calls is vToken's",
        "attention inside the model",
        "outside the engine's core",
        "neither's",
    ],
)
def test_a_stack_belongs_to_its_innermost_code_of_vtoken_or_vllm(
    frames: list[tuple[str, str, str]], expected: tuple[str, str, str | None]
) -> None:
    found = nested(*frames)
    assert (found.owner, found.side) == expected[:2]
    assert expected[2] in (None, found.file)


@pytest.mark.parametrize(
    "work",
    ["sum(i for i in range(20_000))", "all(torch.ones(9).sum() for _ in range(1000))"],
    ids=["Python", "torch"],
)
def test_a_busy_loop_shows_in_its_file_and_no_time_is_lost(work: str) -> None:
    busy = written(VTOKEN, "vllm/worker/busy.py", "busy", work)
    clock = CPUTime()
    with clock:
        end = time.process_time_ns() + 200_000_000
        while time.process_time_ns() < end:
            busy(None)
    assert sum(clock.ns.values()) == clock.total_ns
    assert clock.ns[Place(VTOKEN, WORKER, "vllm/worker/busy.py")] > 0.7 * clock.total_ns


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Loads on another tree than this process's, which `measure` checks."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("vtoken", "api", "tests"):
        (tree / name).symlink_to(HERE / name)
    args = argparse.Namespace(repeats=1, variants=VARIANTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "DRIVER", "tests.support.direct_launches")
        commits, found = host.measure({THIS: tree}, LOAD, args)
    assert commits.keys() == {THIS}
    return found


def test_the_account_of_a_load_is_complete(runs: list[Run]) -> None:
    timed = host.timed(runs)
    assert [run.labels["variant"] for run in timed] == VARIANTS
    for run in timed:
        spent = [*run.figures["ns"]["decode"], *run.figures["ns"]["mixed"]]
        assert sum(ns for *_, ns in spent) == run.figures["cpu_ns"] > 0
        assert run.figures["violations"] == 0
        assert 0 < run.figure("mean_running") <= LOAD["clients"]
        sides = {(owner, side) for owner, side, *_ in spent}
        assert {(VLLM, "scheduler"), (VLLM, WORKER), (VTOKEN, "scheduler")} <= sides


def test_launches_are_those_counted_at_the_kernels(runs: list[Run]) -> None:
    counted = {r.labels["variant"]: r.figures for r in runs if "counted" in r.figures}
    for figures in counted.values():
        steps = [step["counts"] for step in figures["counted"]]
        launches = sum(n for step in steps for kind, _, n in step if kind == "launches")
        assert launches == figures["direct"]
    assert counted["h2o"]["direct"] > counted["none"]["direct"] > 0
    idle = [(kind, n) for step in counted["none"]["counted"] for kind, _, n in step["counts"]]
    assert set(idle) <= {("launches", 1), ("ops", 1)}  # where nothing is evicted


def test_a_step_with_nothing_evicted_keeps_full_graphs(runs: list[Run]) -> None:
    none = next(run.figures for run in runs if run.labels["variant"] == "none")
    assert none["full_graph_steps"] == none["decode_steps"] > 0


def test_the_tables_have_every_variant_and_both_trees(runs: list[Run]) -> None:
    both = [*runs, *(replace(r, labels={**r.labels, "tree": host.OTHER}) for r in runs)]
    trees = {THIS: HERE, host.OTHER: HERE}
    assert len(host.steps_table(both, trees).rows) == 2 * len(VARIANTS)
    ratios = host.ratios_table(both)
    assert [row[0] for row in ratios.rows] == VARIANTS
    assert all(row[2:] == ["1.00"] * 3 for row in ratios.rows), ratios.rows
    assert len(host.counts_table(runs).rows) == len(VARIANTS)
    files = host.files_table(runs)
    shown = {str(row[0]): row[1:] for row in files.rows}
    assert any(name.startswith("worker, ") for name in shown)
    claims = {claim.what: claim for claim in host.claims(runs)}
    assert claims["fixed: vToken's time on the host in a step"].goal == "<= 1.0"


def test_a_folder_without_vtoken_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(quick=True, against=tmp_path, variants=VARIANTS)
    assert host.run(args) == 1
    assert f"no vtoken in {tmp_path}" in capsys.readouterr().err
