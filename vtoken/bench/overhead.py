"""What vToken costs: engine step time and throughput against stock vLLM, paired round by round.

Every variant is an engine in a process of its own; in each round all of them run the same workload
in turn, so that a machine whose speed drifts slows them alike. Reported are the medians over rounds
of the ratio to stock in the same round, with their spread. CPU time a step is the steadiest figure
on a shared machine; the second stock engine shows the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from vtoken.bench.engines import Engine, engine_args, prompt
from vtoken.bench.output import Table, finish, new_result

EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 256,
    "interval_tokens": 0,
}


SIDES = ("scheduler", "worker")
KEYS = ("tokens_per_second", "p50_ms", "p95_ms", "cpu_ms")


@dataclass(frozen=True)
class Variant:
    """`config` is the initial vToken configuration, None for stock vLLM."""

    name: str
    config: dict[str, Any] | None
    console: bool = False


VARIANTS = (
    Variant("stock vLLM", None),
    Variant("stock vLLM, again", None),
    Variant("plugin idle", {}),
    Variant("plugin idle, console connected", {}, console=True),
    Variant("eviction, recycling", EVICTING),
    Variant("eviction, recycling, console connected", EVICTING, console=True),
    Variant("eviction, naive (holes)", EVICTING | {"reclamation": "off", "interval_tokens": 64}),
    Variant(
        "eviction, eager plug",
        EVICTING
        | {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 512, "interval_tokens": 64},
    ),
)


def _workload(requests: int, num_new: int) -> dict[str, Any]:
    rng = random.Random(0)
    lengths = [rng.randrange(64, 640) for _ in range(requests)]
    prompts = [prompt(rng, length) for length in lengths]
    return {"requests": [{"prompt": ids, "num_new": num_new} for ids in prompts]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="pairs of every variant")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--model", help="a model folder (default: the demo model)")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.quick:
        args.rounds, args.new_tokens = 1, 64
    common = engine_args(
        args.model, block_size=32, max_model_len=2048, kv_cache_memory_bytes=64 << 20
    )
    workload = _workload(args.requests, args.new_tokens)
    engines: list[Engine] = []
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for variant in VARIANTS:
            print(f"starting {variant.name}", file=sys.stderr, flush=True)
            engines.append(Engine(variant.name, variant.config, common))
            if variant.console:
                engines[-1].subscribe()
        for engine in engines:
            engine.ask(workload)  # warm-up
        for number in range(args.rounds):
            order = engines if number % 2 == 0 else engines[::-1]
            figures = {}
            for engine in order:
                answer = engine.ask(workload)
                steps = sorted(answer["steps_ms"])
                figures[engine.name] = {
                    "tokens_per_second": answer["tokens"] / answer["seconds"],
                    "p50_ms": steps[len(steps) // 2],
                    "p95_ms": steps[int(len(steps) * 0.95)],
                    **{
                        f"{side}_us": seconds * 1e6 / len(steps)
                        for side, seconds in answer["hook_seconds"].items()
                    },
                    "cpu_ms": answer["cpu_seconds"] * 1e3 / len(steps),
                }
            rounds.append(figures)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    finally:
        for engine in engines:
            engine.close()
    rows = [_row(variant.name, rounds) for variant in VARIANTS]
    setup = {
        "requests": args.requests,
        "new tokens each": args.new_tokens,
        "rounds": args.rounds,
        "block size": 32,
    }
    result = new_result("overhead", "make bench-overhead", setup)
    result.tables = [_table(rows)]
    result.raw = {"rounds": rounds, "rows": rows}
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _row(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    stock = VARIANTS[0].name

    def ratios(key: str) -> list[float]:
        return sorted(r[name][key] / r[stock][key] for r in rounds)

    out: dict[str, Any] = {"variant": name}
    for key in KEYS:
        values = ratios(key)
        out[key] = statistics.median(r[name][key] for r in rounds)
        out[f"{key}_ratio"] = statistics.median(values)
        out[f"{key}_ratio_range"] = [values[0], values[-1]]
    for side in SIDES:
        out[f"{side}_us"] = statistics.median(r[name][f"{side}_us"] for r in rounds)
    return out


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "Ratios to stock vLLM of the same round: median [lowest .. highest]",
        [
            "variant",
            "tok/s",
            "tok/s ratio",
            "step p50 ratio",
            "step p95 ratio",
            "CPU a step ratio",
            *(f"µs, {side}" for side in SIDES),
        ],
        [],
        [
            "µs: a step's time in vToken's own code on either side, publishing included",
            "goal and paper: idle plugin within 1.0% of native, throughput and p95",
        ],
    )
    for row in rows:
        cells = []
        for key in KEYS:
            low, high = row[f"{key}_ratio_range"]
            cells.append(f"{row[f'{key}_ratio']:.3f} [{low:.2f} .. {high:.2f}]")
        own = [row[f"{side}_us"] for side in SIDES]
        table.rows.append([row["variant"], row["tokens_per_second"], *cells, *own])
    return table
