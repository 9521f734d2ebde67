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
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import vtoken
from vtoken_bench.claims import Claim, student_interval
from vtoken_bench.engines import EngineError, Process, thread_environment
from vtoken_bench.evaluation.answers import CONFIGS, FIXED, PRESSURE
from vtoken_bench.evaluation.effects import bounds, spread
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
Row = dict[str, Any]  # one load, see `HostEngine.run`
Figure = Callable[[Row], float]


def of(owner: str, *sides: str, kind: str = "decode") -> Figure:
    """CPU time a step of an owner's code on these sides, in ms."""

    def figure(row: Row) -> float:
        steps = row["decode_steps"] if kind == "decode" else row["steps"] - row["decode_steps"]
        found = sum(ns for who, side, _, ns in row["ns"][kind] if who == owner and side in sides)
        return float(found / (1e6 * steps))

    return figure


def full_graphs(row: Row) -> float:
    """The share of decode steps that keep vLLM's full graphs."""
    share: float = row["full_graph_steps"] / row["decode_steps"]
    return share


v_ms, b_ms = of(VTOKEN, *SIDES), of(VLLM, *SIDES)


def v_of_b(row: Row) -> float:
    return v_ms(row) / b_ms(row)


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
        commits, rows = measure(trees, asdict(load) | {"blocks": load.num_blocks(16)}, args)
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
    result.claims = claims(rows)
    result.tables = [
        goals_table(result.claims),
        steps_table(rows, trees),
        *([ratios_table(rows)] if args.against else []),
        counts_table(rows),
        files_table(rows),
    ]
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
) -> tuple[dict[str, str], list[Row]]:
    """Commit by tree, and every load: first the counted ones, which warm up, then the timed ones.

    Raises EngineError.
    """
    rows: list[Row] = []
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
                    rows.append({"tree": tree, "variant": variant, "repeat": repeat} | found)
    return commits, rows


def over_repeats(
    rows: Sequence[Row], figure: Figure, variant: str, tree: str = THIS
) -> list[float]:
    """The figure of every timed load of the variant."""
    of_both = [r for r in rows if (r["tree"], r["variant"]) == (tree, variant)]
    return [figure(row) for row in of_both if "ns" in row]


def variants_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for row in rows))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """V against its goal, and its ratio to B, of this tree."""
    found = []
    for variant in variants_of(rows):
        goal = f"<= {GOALS_MS[variant]}" if variant in GOALS_MS else ""
        for what, figure, unit, bound in (
            ("vToken's time on the host in a step", v_ms, "ms", goal),
            ("the same, of vLLM's own", v_of_b, "x", ""),
        ):
            values = over_repeats(rows, figure, variant)
            name = f"{variant}: {what}"
            found.append(Claim.of("GPU host", name, "stub", values, unit, goal=bound))
    return found


def steps_table(rows: Sequence[Row], trees: Collection[str]) -> Table:
    return Table.of(
        "CPU time of the host, ms a decode step",
        [_steps(rows, variant, tree) for tree in trees for variant in variants_of(rows)],
        "B: vLLM's time, without model, sampling and the processing of outputs; V: vToken's",
        "other steps: with prompts, whose tensors are large: the CPU's arithmetic counts too",
        "range: over the repeats",
    )


def _steps(rows: Sequence[Row], variant: str, tree: str) -> dict[str, Cell]:
    def middle(figure: Figure) -> float:
        return statistics.median(over_repeats(rows, figure, variant, tree))

    return {
        "variant": f"{variant}, {tree}",
        "running": middle(lambda row: float(row["mean_running"])),
        **{f"vLLM's {side}": middle(of(VLLM, side)) for side in SIDES},
        **{f"vToken's {side}": middle(of(VTOKEN, side)) for side in (SCHEDULER, WORKER)},
        "V [range]": spread(over_repeats(rows, v_ms, variant, tree)),
        "V / B [range]": spread(over_repeats(rows, v_of_b, variant, tree)),
        "V, other steps": middle(of(VTOKEN, *SIDES, kind="mixed")),
        "full graphs": f"{middle(full_graphs):.0%}",
    }


def ratios_table(rows: Sequence[Row]) -> Table:
    """Of both trees, paired by repeat."""
    title = "This tree against the other, loads of one repeat"
    return Table.of(title, [_ratios(rows, variant) for variant in variants_of(rows)])


def _ratios(rows: Sequence[Row], variant: str) -> dict[str, Cell]:
    def ratio(figure: Figure) -> list[float]:
        both = [over_repeats(rows, figure, variant, tree) for tree in (THIS, OTHER)]
        return [this / other for this, other in zip(*both, strict=True)]

    own = ratio(v_ms)
    return {
        "variant": variant,
        "V, other [ms]": statistics.median(over_repeats(rows, v_ms, variant, OTHER)),
        "V, this [ms]": statistics.median(over_repeats(rows, v_ms, variant)),
        "V [range]": spread(own),
        "95%": bounds(student_interval(own)).strip(" []"),
        "V / B [range]": spread(ratio(v_of_b)),
        "B": spread(ratio(b_ms)),
    }


def counts_table(rows: Sequence[Row]) -> Table:
    title = "What vToken has the device do in a decode step: median (mean)"
    return Table.of(title, [_counts(row) for row in rows if "counted" in row])


def _counts(row: Row) -> dict[str, Cell]:
    found: dict[str, Cell] = {"variant": f"{row['variant']}, {row['tree']}"}
    steps = [step["counts"] for step in row["counted"] if step["decodes"]]
    for kind, name in KINDS.items():
        each = [sum(n for k, _, n in step if k == kind) for step in steps]
        found[name] = f"{statistics.median(each):.0f} ({statistics.fmean(each):.1f})"
    return found


def files_table(rows: Sequence[Row]) -> Table:
    """This tree's time by file, the mean of the repeats; small ones of a side together."""
    variants = variants_of(rows)
    us: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row["tree"] != THIS or "ns" not in row:
            continue
        loads = len(over_repeats(rows, v_ms, row["variant"]))
        for owner, side, file, ns in row["ns"]["decode"]:
            if owner == VTOKEN:
                us[side, file][row["variant"]] += ns / row["decode_steps"] / 1e3 / loads
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
