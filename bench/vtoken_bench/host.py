"""`vtoken bench host`: the host's time in a step of the CUDA worker, measured without a GPU.

Each load runs on an engine that does a GPU's host work and none of its kernels
(`vtoken_bench.vllm.host`), with the requests, memory and policies of check 6 of docs/gpu.md. V is
the CPU time of vToken's code in a decode step, B that of vLLM's, in the same load. With
`--against FOLDER` vToken of another checkout runs the same loads in turn, under the same driver.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import vtoken
from vtoken_bench.claims import Claim
from vtoken_bench.engines import EngineError, Process, thread_environment
from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import CONFIGS, FIXED, PRESSURE
from vtoken_bench.evaluation.effects import SHOWN, Figure
from vtoken_bench.evaluation.points import Run, pick, variants_of
from vtoken_bench.evaluation.variants import NAIVE
from vtoken_bench.output import Cell, Table, finish, goals_table, new_result

HERE, BENCH_FOLDER = Path(vtoken.__file__).parents[1], Path(__file__).parents[1]
THIS, OTHER = "this", "other"
KEEP = {"budget_ratio": 0.5}  # of the prompt
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"policy": {"name": "none"}},
    "naive-evict": CONFIGS[NAIVE] | KEEP,
    "fixed": CONFIGS[FIXED] | KEEP,
    "pressure": CONFIGS[PRESSURE] | KEEP,
    "h2o": CONFIGS[FIXED] | KEEP | {"policy": {"name": "h2o"}},
    "streaming": CONFIGS[FIXED] | KEEP | {"policy": {"name": "streaming_llm"}},
}
IN_ORDER = {"h2o"}  # on a GPU, check 6 found its victims side by side: it relocated nothing
GOALS_MS = {"fixed": 1.0, "pressure": 2.0, "h2o": 1.5}  # V, with about 30 clients
VTOKEN, VLLM, BENCH = "vtoken", "vllm", "bench"  # owners of code
SCHEDULER, WORKER, LOOP = SIDES = ("scheduler", "worker", "loop")
ATTENTION, FRONT = "attention", "front end"  # not counted: the model's, and outside the core
DRIVER = "vtoken_bench.vllm.host"
KINDS = {
    "launches": "launches of Triton",
    "uploads": "uploads",
    "downloads": "downloads",
    "ops": "operations of torch",
}
SHOWN_US = 25.0  # of a file in a step of any variant


def of(owner: str, *sides: str, kind: str = "decode") -> Figure:
    """CPU time a step of an owner's code on these sides, in ms."""

    def figure(run: Run) -> float:
        decode_steps = run.figures["decode_steps"]
        steps = decode_steps if kind == "decode" else run.figures["steps"] - decode_steps
        found = sum(
            ns for who, side, _, ns in run.figures["ns"][kind] if owner == who and side in sides
        )
        return float(found / (1e6 * steps))

    return figure


def full_graphs(run: Run) -> float:
    """The percentage of decode steps that keep vLLM's full graphs."""
    return 100 * run.figure("full_graph_steps") / run.figure("decode_steps")


v_ms, b_ms = of(VTOKEN, *SIDES), of(VLLM, *SIDES)


def v_of_b(run: Run) -> float:
    return v_ms(run) / b_ms(run)


STEPS = (
    columns.of_figure("running", "mean_running"),
    *[columns.of_figure(f"vLLM's {side}", of(VLLM, side)) for side in SIDES],
    *[columns.of_figure(f"vToken's {side}", of(VTOKEN, side)) for side in (SCHEDULER, WORKER)],
    columns.of_figure("V", v_ms, "V: vToken's time, median [range] of the repeats, as all columns"),
    columns.of_figure(
        "V / B",
        v_of_b,
        "B: vLLM's time, without model, sampling and the processing of outputs",
    ),
    columns.of_figure(
        "V, other steps",
        of(VTOKEN, *SIDES, kind="mixed"),
        "other steps: with prompts, whose tensors are large: the CPU's arithmetic counts too",
    ),
    columns.of_figure("full graphs [%]", full_graphs),
)
RATIO_NOTE = f"ratios: {SHOWN}"
RATIOS = (
    columns.of_figure("V, this [ms]", v_ms),
    columns.of_ratio("V", v_ms, RATIO_NOTE),
    columns.of_ratio("V / B", v_of_b, RATIO_NOTE),
    columns.of_ratio("B", b_ms, RATIO_NOTE),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=6, help="timed loads per variant")
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="another checkout, measured in turn"
    )


def run(args: argparse.Namespace) -> int:
    from vtoken_bench.serving_check import Load  # imports torch

    started = time.monotonic()
    load = Load()
    if args.quick:
        args.repeats, load = 1, replace(load, requests=load.clients, new_tokens=64)
    trees = {THIS: HERE} | ({OTHER: args.against.resolve()} if args.against else {})
    for tree in trees.values():
        if not (tree / "vtoken" / "__init__.py").is_file():
            print(f"vtoken bench host: no vtoken in {tree}", file=sys.stderr)
            return 1
    try:
        commits, runs = measure(trees, asdict(load) | {"blocks": load.num_blocks(16)}, args)
    except EngineError as error:
        print(f"vtoken bench host: {error}", file=sys.stderr)
        return 1
    setup = {
        "requests": f"{load.requests} of {load.prompt_tokens:,} + {load.new_tokens} tokens",
        "clients": load.clients,
        "memory for": f"{load.pool:.0%}",
        "repeats": args.repeats,
        **({"other": commits[OTHER] or "no checkout"} if args.against else {}),
    }
    result = new_result("host", "make bench-host", setup)
    result.claims = claims(runs)
    result.tables = [
        goals_table(result.claims),
        steps_table(runs, trees),
        *([ratios_table(runs)] if args.against else []),
        counts_table(runs),
        files_table(runs),
    ]
    rows = [{**run.labels, "repeat": run.repeat} | run.figures for run in runs]
    result.raw = {"commits": commits, "rows": rows}
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def environment(tree: Path) -> dict[str, str]:
    """For a process with the packages of `tree` and these benchmarks, not of its own folder."""
    path = f"{tree}:{tree / 'api'}:{BENCH_FOLDER}"
    return {**thread_environment(1), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def measure(
    trees: dict[str, Path], load: dict[str, Any], args: argparse.Namespace
) -> tuple[dict[str, str], list[Run]]:
    """Commit by tree, and every load: first the counted ones, which warm up, then the timed ones.

    A run's figures are those of `HostEngine.run`. Raises EngineError.
    """
    runs: list[Run] = []
    with ExitStack() as stack:
        engines = {
            tree: stack.enter_context(closing(Process(tree, DRIVER, environment(folder))))
            for tree, folder in trees.items()
        }
        commits = {}
        for tree, engine in engines.items():
            facts = engine.ask(load)
            if facts["tree"] != str(trees[tree]):
                raise EngineError(f"vToken of {facts['tree']} ran, not of {trees[tree]}")
            commits[tree] = facts["commit"]
        for repeat in range(-1, args.repeats):
            for variant in args.variants:
                for tree in list(trees)[:: -1 if repeat % 2 else 1]:
                    print(f"repeat {repeat + 1}: {variant}, {tree}", file=sys.stderr, flush=True)
                    found = engines[tree].ask(
                        {
                            "config": VARIANTS[variant],
                            "seed": repeat + 1,
                            "count": repeat < 0,
                            "scatters": variant not in IN_ORDER,
                        }
                    )
                    runs.append(Run({"tree": tree, "variant": variant}, repeat, found))
    return commits, runs


def timed(runs: Sequence[Run]) -> list[Run]:
    """All loads but the counted ones."""
    return [run for run in runs if "ns" in run.figures]


def claims(runs: Sequence[Run]) -> list[Claim]:
    """V against its goal, and its ratio to B, of this tree."""
    found = []
    for variant in variants_of(runs):
        own = pick(timed(runs), tree=THIS, variant=variant)
        goal = f"<= {GOALS_MS[variant]}" if variant in GOALS_MS else ""
        for what, figure, unit, bound in (
            ("vToken's time on the host in a step", v_ms, "ms", goal),
            ("the same, of vLLM's own", v_of_b, "x", ""),
        ):
            name, values = f"{variant}: {what}", [figure(run) for run in own]
            found.append(Claim.of("GPU host", name, "stub", values, unit, goal=bound))
    return found


def steps_table(runs: Sequence[Run], trees: Collection[str]) -> Table:
    rows = [
        columns.Row(f"{variant}, {tree}", timed(runs), {"tree": tree, "variant": variant})
        for tree in trees
        for variant in variants_of(runs)
    ]
    return columns.table("CPU time of the host, ms a decode step", "variant", rows, STEPS)


def ratios_table(runs: Sequence[Run]) -> Table:
    """Of both trees, paired by repeat."""
    rows = []
    for variant in variants_of(runs):
        this, other = ({"tree": tree, "variant": variant} for tree in (THIS, OTHER))
        rows.append(columns.Row(variant, timed(runs), this, other))
    title = "This tree against the other, loads of one repeat"
    return columns.table(title, "variant", rows, RATIOS)


def counts_table(runs: Sequence[Run]) -> Table:
    title = "What vToken has the device do in a decode step: median (mean)"
    return Table.of(title, [_counts(run) for run in runs if "counted" in run.figures])


def _counts(run: Run) -> dict[str, Cell]:
    found: dict[str, Cell] = {"variant": f"{run.labels['variant']}, {run.labels['tree']}"}
    steps = [step["counts"] for step in run.figures["counted"] if step["decodes"]]
    for kind, name in KINDS.items():
        each = [sum(n for k, _, n in step if k == kind) for step in steps]
        found[name] = f"{statistics.median(each):.0f} ({statistics.fmean(each):.1f})"
    return found


def files_table(runs: Sequence[Run]) -> Table:
    """This tree's time by file, the mean of the repeats; small ones of a side together."""
    variants = variants_of(runs)
    us: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for variant in variants:
        own = pick(timed(runs), tree=THIS, variant=variant)
        for run in own:
            for owner, side, file, ns in run.figures["ns"]["decode"]:
                if owner == VTOKEN:
                    us[side, file][variant] += ns / run.figures["decode_steps"] / 1e3 / len(own)
    shown: dict[tuple[str, str], Counter[str]] = {}
    for (side, file), found in us.items():
        name = file if max(found.values()) >= SHOWN_US else "other files"
        shown.setdefault((side, name), Counter()).update(found)
    by_side = sorted(shown, key=lambda key: (SIDES.index(key[0]), -max(shown[key].values())))
    return Table.of(
        "vToken's CPU time by file, µs a decode step",
        [
            {"side, file": f"{side}, {file}"} | {v: round(shown[side, file][v]) for v in variants}
            for side, file in by_side
        ],
    )
