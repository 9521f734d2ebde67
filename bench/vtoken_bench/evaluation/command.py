"""`vtoken bench evaluation`: the parts of the paper's section 5, one JSON file each.

1. A point that was measured under the same key is not measured again; `--again` starts anew.
2. Whatever ends a run early, what is finished is in the log, and a part's file is written whole.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target as targets
from vtoken_bench.engines import EngineError
from vtoken_bench.evaluation import (
    capacity,
    frontier,
    goodput,
    hybrid,
    memory,
    prefixes,
    relocation,
    sensitivity,
    stability,
)
from vtoken_bench.evaluation.points import Experiment, Setting
from vtoken_bench.evaluation.running import Engines, measure
from vtoken_bench.log import Log
from vtoken_bench.output import FOLDER, Result, finish, new_result

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        goodput.EXPERIMENT,
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
    "goodput",
    "memory",
    "long",
    "capacity",
    "frontier",
    "sensitivity",
    "relocation",
    "stability",
    "hybrid",
)
BULKY = ("requests", "output_ids")  # a number or more for every request or token
SECOND_PARTS = ("capacity",)  # of another architecture: the paper's check on a larger model
MOST_ENGINES = {"cpu": 4, "cuda": 2}  # open at a time, over all parts
LEAST_ENGINES = 2  # of a part: it alternates between stock vLLM and vToken


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
    parser.add_argument("--repeats", type=int, default=3, help="of every point (default: 3)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="parts that run side by side, each on cores of its own: with --threads 1 as many as"
        " there are cores (default: 1)",
    )
    parser.add_argument("--again", action="store_true", help="measure anew what is in the log")
    targets.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.jobs < 1:
        print(f"--jobs {args.jobs}: at least one part runs at a time", file=sys.stderr)
        return 2
    try:
        target = targets.target(args)
        for model in args.model:
            targets.model_folder(model)
    except (targets.TargetError, TrainedModelError) as error:
        print(error, file=sys.stderr)
        return 1
    folder = args.json.parent if args.json else FOLDER
    pool = ThreadPoolExecutor(args.jobs)
    parts = {
        name: pool.submit(_part, EXPERIMENTS[name], target, folder, args) for name in args.parts
    }
    failed = 0
    try:
        for name, part in parts.items():
            try:
                part.result()
            except EngineError as error:  # of this part alone
                print(f"{name}: {error}", file=sys.stderr)
                failed = 1
    finally:  # after Ctrl-C no further part starts; the engines have got the signal, too
        pool.shutdown(wait=False, cancel_futures=True)
    return failed


def _part(
    experiment: Experiment, target: targets.Target, folder: Path, args: argparse.Namespace
) -> None:
    log = Log(folder / "evaluation" / f"{experiment.name}.jsonl")
    if args.again:
        log.path.unlink(missing_ok=True)
        log = Log(log.path)
    command = f"{targets.make_target('bench-evaluation', args)} ARGS='--parts {experiment.name}'"
    name = f"evaluation-{experiment.name}"
    setup = target.described() | {"repeats": ""}  # its place; `repeats_of` the runs
    if args.jobs > 1:
        setup["parts side by side"] = args.jobs
    result = new_result(name, command, setup)
    result.raw = []
    most = max(LEAST_ENGINES, MOST_ENGINES[target.device] // args.jobs)
    with closing(Engines(target, most)) as engines:
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
    if slow and experiment.name not in (SECOND_PARTS if model == targets.QWEN3 else SLOW_PARTS):
        return
    setting = Setting(
        model=model,
        block_size=target.stock_block_size,
        slow=slow,
        quick=args.quick,
        repeats=1 if args.quick else args.repeats,
        on_gpu=on_gpu,
    )
    title = f"{experiment.name}, {model}"
    runs = measure(experiment.comparisons(setting), log, engines, title)
    if not runs:
        return  # not of this model
    if experiment.then is not None:
        runs += measure(experiment.then(setting, runs), log, engines, title)
    name = Path(model).name
    experiment.report(result, name, runs)
    result.seconds += sum(run.seconds for run in runs)  # earlier runs' too; without engine starts
    result.raw += [
        {"model": name, "labels": dict(run.labels), "repeat": run.repeat}
        | {what: value for what, value in run.figures.items() if what not in BULKY}
        for run in runs
    ]
