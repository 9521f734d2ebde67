"""`vtoken bench evaluation`: the parts of the paper's section 5, one JSON file each.

1. A point that was measured under the same key is not measured again; `--again` starts anew.
2. Whatever ends a run early, what is finished is in the log, and a part's file is written whole.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target as targets
from vtoken_bench.engines import EngineError
from vtoken_bench.evaluation import (
    capacity,
    causes,
    curve,
    floors,
    frontier,
    hybrid,
    loss,
    memory,
    prefixes,
    pressure,
    relocation,
    sensitivity,
    stability,
)
from vtoken_bench.evaluation.points import Comparison, Experiment, Run, Setting, stamp
from vtoken_bench.evaluation.running import Engines, measure
from vtoken_bench.log import Log
from vtoken_bench.output import BULKY, FOLDER, Result, finish, new_result

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        causes.EXPERIMENT,
        loss.EXPERIMENT,
        curve.EXPERIMENT,
        floors.EXPERIMENT,
        pressure.EXPERIMENT,
        memory.EXPERIMENT,
        memory.LONG,
        capacity.EXPERIMENT,
        frontier.EXPERIMENT,
        sensitivity.EXPERIMENT,
        prefixes.EXPERIMENT,
        relocation.EXPERIMENT,
        stability.EXPERIMENT,
        hybrid.EXPERIMENT,
    )
}
# What a trained model on a CPU has time for; the tiny model shows the shape of all of it.
SLOW_PARTS = (
    "causes",
    "loss",
    "curve",
    "floors",
    "pressure",
    "memory",
    "long",
    "capacity",
    "frontier",
    "sensitivity",
    "relocation",
    "stability",
    "hybrid",
)
SECOND_PARTS = ("capacity",)  # of another architecture: the paper's check on a larger model
TRAINED_PARTS = ("causes", "floors", "pressure")  # nothing to find out from random weights
MOST_ENGINES = {"cpu": 4, "cuda": 2}  # open at a time
MOST_TOGETHER = {"cpu": 9, "cuda": 0}  # 1.5 GiB each with the trained model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="(default: all)"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(targets.MODELS),
        help=f"of {', '.join(targets.NAMES)} or a folder (default: {' '.join(targets.MODELS)})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help="of every point, each with engine processes of its own (default: 8 in parts whose "
        "speeds have intervals, 3 elsewhere; each part first says how long it may take: on the "
        "trained model and two cores `causes`, `curve` and `pressure` need hours each)",
    )
    parser.add_argument("--again", action="store_true", help="measure anew what is in the log")
    targets.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        target = targets.target(args)
        for model in args.model:
            targets.model_folder(model)
    except (targets.TargetError, TrainedModelError) as error:
        print(error, file=sys.stderr)
        return 1
    folder = args.json.parent if args.json else FOLDER
    failed = 0
    for name in args.parts:
        try:
            _part(EXPERIMENTS[name], target, folder, args)
        except EngineError as error:  # of this part alone
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


def _part(
    experiment: Experiment, target: targets.Target, folder: Path, args: argparse.Namespace
) -> None:
    log = Log.opened(folder / "evaluation" / f"{experiment.name}.jsonl", again=args.again)
    command = f"{targets.make_target('bench-evaluation', args)} ARGS='--parts {experiment.name}'"
    name = f"evaluation-{experiment.name}"
    setup = target.described() | {"repeats": ""}  # its place; `repeats_of` the runs
    result = new_result(name, command, setup)
    result.raw = []
    most, most_together = MOST_ENGINES[target.device], MOST_TOGETHER[target.device]
    with closing(Engines(target, most, most_together)) as engines:
        for model in args.model:
            _measure(experiment, model, target, log, engines, result, args)
    result.setup["repeats"] = repeats_of(result.raw)
    finish(result, path=folder / f"{name}.json", markdown=args.markdown)


def repeats_of(raw: Sequence[Mapping[str, Any]]) -> str:
    """How often the points of each model ran, as "demo 1 to 3, trained 1"."""
    found = []
    for model in dict.fromkeys(run["model"] for run in raw):
        points = Counter(str(run["labels"]) for run in raw if run["model"] == model)
        least, most = min(points.values()), max(points.values())
        found.append(f"{model} {least}" + (f" to {most}" if most > least else ""))
    return ", ".join(found)


def is_new(comparison: Comparison, runs: Sequence[Run]) -> bool:
    """Whether a load of the comparison has not run yet."""
    ran = {(str(run.labels), run.repeat) for run in runs}
    return any(
        (str(point.labels), repeat) not in ran
        for point in comparison.points
        for repeat in range(comparison.first, comparison.repeats)
    )


def _measure(
    experiment: Experiment,
    model: str,
    target: targets.Target,
    log: Log,
    engines: Engines,
    result: Result,
    args: argparse.Namespace,
) -> None:
    on_gpu = target.device == "cuda"
    slow = not on_gpu and model != targets.DEMO
    untrained = model in targets.UNTRAINED or target.dummy_weights
    if untrained and experiment.name in TRAINED_PARTS:
        print(f"{experiment.name}: not on {model}, it needs a trained model", file=sys.stderr)
        return
    if slow and experiment.name not in (SECOND_PARTS if model == targets.QWEN3 else SLOW_PARTS):
        return
    setting = Setting(
        model=model,
        block_size=target.stock_block_size,
        slow=slow,
        quick=args.quick,
        repeats=1 if args.quick else args.repeats or experiment.repeats,
        on_gpu=on_gpu,
    )
    title = f"{experiment.name}, {model}"
    runs = measure(experiment.comparisons(setting), log, engines, title)
    if not runs:
        return  # not of this model
    while experiment.then is not None:
        more = [found for found in experiment.then(setting, runs) if is_new(found, runs)]
        if not more:
            break
        runs += measure(more, log, engines, title)
    name = Path(model).name
    experiment.report(result, name, runs)
    result.measured[name] = stamp(runs)
    result.seconds += sum(run.seconds for run in runs)  # earlier runs' too; without engine starts
    result.raw += [
        {"model": name, "labels": dict(run.labels), "repeat": run.repeat}
        | {what: value for what, value in run.figures.items() if what not in BULKY}
        for run in runs
    ]
