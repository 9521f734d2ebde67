"""`vtoken bench evaluation`: vToken beside native vLLM and naive-evict, one JSON file a part.

1. A point that was measured under the same key is not measured again; `--again` starts anew.
2. Whatever ends a run early, what is finished is in the log, and a part's file is written whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtoken.demo.trained_model import TrainedModelError
from vtoken.wire import ConfigValues
from vtoken_bench import target as targets
from vtoken_bench.engines import EngineError
from vtoken_bench.evaluation import causes, curve, floors, loss, parking, pressure, turns
from vtoken_bench.evaluation.points import Comparison, Part, Run, Setting, stamp
from vtoken_bench.evaluation.running import Engines, measure
from vtoken_bench.log import Log
from vtoken_bench.output import BULKY, FOLDER, Result, finish, new_result

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        causes.PART,
        loss.PART,
        curve.PART,
        floors.PART,
        pressure.PART,
        parking.PART,
        turns.PART,
    )
}
REPEATS = 8  # of every point: an interval of a speed takes them
MOST_TOGETHER = {"cpu": 9, "cuda": 1}  # 1.5 GiB each with the trained model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)"
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
        default=REPEATS,
        help="of every point, each with engine processes of its own (default: %(default)s; each "
        "part first says how long it may take: on the trained model and two cores `causes`, "
        "`curve` and `pressure` need hours each)",
    )
    parser.add_argument(
        "--also",
        nargs="+",
        type=setting_of,
        default=[],
        metavar="FIELD=VALUE",
        help="part `turns`: for each one more arm, `auto` with this value of the configuration",
    )
    parser.add_argument("--again", action="store_true", help="measure anew what is in the log")
    targets.add_arguments(parser)


def setting_of(text: str) -> tuple[str, Any]:
    """A field of the configuration and its value, which is JSON or else plain text."""
    name, between, value = text.partition("=")
    if not between or name not in ConfigValues.__struct_fields__:
        raise argparse.ArgumentTypeError(f"{text} is not FIELD=VALUE of the configuration")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def run(args: argparse.Namespace) -> int:
    try:
        target = targets.target(args)
        for model in args.model:
            targets.model_folder(model)
    except (targets.TargetError, TrainedModelError) as error:
        print(error, file=sys.stderr)
        return 1
    if fixed := [name for name in args.parts if args.also and not PARTS[name].varies]:
        print(f"--also: {', '.join(fixed)} has no arms of settings", file=sys.stderr)
        return 1
    folder = args.json.parent if args.json else FOLDER
    failed = 0
    for name in args.parts:
        try:
            _part(PARTS[name], target, folder, args)
        except EngineError as error:  # of this part alone
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


def _part(part: Part, target: targets.Target, folder: Path, args: argparse.Namespace) -> None:
    log = Log.opened(folder / "evaluation" / f"{part.name}.jsonl", again=args.again)
    command = f"{targets.make_target('bench-evaluation', args)} ARGS='--parts {part.name}'"
    name = f"evaluation-{part.name}"
    result = new_result(name, command, target.described())
    result.raw = []
    for model in args.model:
        if part.trained and (model in targets.UNTRAINED or target.dummy_weights):
            print(f"{part.name}: not on {model}, it needs a trained model", file=sys.stderr)
            continue
        _measure(part, model, target, log, result, args)
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
    part: Part,
    model: str,
    target: targets.Target,
    log: Log,
    result: Result,
    args: argparse.Namespace,
) -> None:
    repeats = 1 if args.quick else args.repeats
    setting = Setting(model, target.stock_block_size, args.quick, repeats, tuple(args.also))
    engines = Engines(target, MOST_TOGETHER[target.device])
    title = f"{part.name}, {model}"
    runs = measure(part.comparisons(setting), log, engines, title)
    while part.then is not None:
        more = [found for found in part.then(setting, runs) if is_new(found, runs)]
        if not more:
            break
        runs += measure(more, log, engines, title)
    name = Path(model).name
    part.report(result, name, runs)
    result.measured[name] = stamp(runs)
    result.seconds += sum(run.seconds for run in runs)  # earlier runs' too; without engine starts
    result.raw += [
        {"model": name, "labels": dict(run.labels), "repeat": run.repeat}
        | {what: value for what, value in run.figures.items() if what not in BULKY}
        for run in runs
    ]
