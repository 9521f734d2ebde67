"""What eviction leaves in memory: retained blocks, utilisation and F, before and after reclaiming.

Every variant is an engine of its own and runs the same closed-loop workloads with the same budgets:
half of prompt and output, a request. Memory is sampled between steps. Tokens of the evicting
variants are compared: where they are equal, so were the decisions.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from vtoken.bench import prefixes
from vtoken.bench.engines import prompt
from vtoken.bench.output import Table, finish, new_result
from vtoken.bench.variants import (
    BLOCK_SIZE,
    INTERVAL_TOKENS,
    SAMPLE_EVERY,
    VARIANTS,
    find,
    request,
    start,
)
from vtoken.policies import policy_names

BOUND_GOAL = 0.02  # over the packed bound, reclaiming eagerly
OTHER_POLICIES = ("random", "scissorhands", "streaming_llm")  # beside h2o; those registered
PAPER = {
    "retained": "27.2 to 72.3% fewer blocks than naive-evict",
    "utilisation": "+21.9 points",
    "f": "naive-evict: most blocks at most 50% full, F 40 to 60%",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts`, `outputs`: inclusive ranges of lengths; `concurrency` requests at a time."""

    name: str
    requests: int
    concurrency: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]

    def requests_of(self, seed: int, *, evicting: bool) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        out = []
        for _ in range(self.requests):
            num_prompt, num_new = rng.randint(*self.prompts), rng.randint(*self.outputs)
            out.append(request(prompt(rng, num_prompt), num_new, evicting=evicting))
        return out


WORKLOADS = (
    Workload("short chat", 24, 8, (64, 512), (64, 256)),
    Workload("long context", 8, 4, (1000, 1500), (256, 384)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", nargs="+", help="(default: h2o and its peers)")
    parser.add_argument("--model", help="a model folder (default: the demo model)")
    parser.add_argument("--part", choices=["workloads", "prefix", "both"], default="both")


def policies(asked: list[str] | None) -> list[str]:
    """The policies to measure; ValueError when one is not registered."""
    known = policy_names()
    if asked is None:
        return ["h2o", *[name for name in OTHER_POLICIES if name in known]]
    for name in asked:
        if name not in known:
            raise ValueError(f"no policy {name!r}; there are {', '.join(known)}")
    return asked


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    names = policies(args.policies)[: 1 if args.quick else None]
    setup = {"block size": BLOCK_SIZE, "budget": "half of prompt and output"}
    result = new_result("memory", "make bench-memory", setup | {"interval": INTERVAL_TOKENS})
    raw: dict[str, Any] = {"workloads": [], "prefix": []}
    if args.part != "prefix":
        raw["workloads"] = _workloads(names, args)
        result.tables += _memory_tables(raw["workloads"])
    if args.part != "workloads":
        raw["prefix"] = prefixes.measure(quick=args.quick)
        result.tables.append(prefixes.table(raw["prefix"]))
    result.raw = raw | {"paper": PAPER}
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _workloads(names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for variant, config in {"native": {}, **VARIANTS}.items():
        engine = start(variant, config, 1024, model=args.model)
        try:
            for workload in WORKLOADS:
                for policy in ["none"] if variant == "native" else names:
                    answer = engine.ask(
                        {
                            "requests": workload.requests_of(1, evicting=variant != "native"),
                            "concurrency": workload.concurrency,
                            "config": {"policy": {"name": policy}},
                            "sample_every": SAMPLE_EVERY,
                        }
                    )
                    answer.pop("steps_ms")
                    keys = {"workload": workload.name, "policy": policy, "variant": variant}
                    rows.append(keys | answer)
                    print(f"{variant}, {workload.name}, {policy}", file=sys.stderr, flush=True)
        finally:
            engine.close()
    for row in rows:
        naive = find(rows, row, "naive-evict")
        row["tokens_equal_naive"] = naive and row["tokens_hash"] == naive["tokens_hash"]
    return rows


def _memory_tables(rows: list[dict[str, Any]]) -> list[Table]:
    tables = []
    for workload in WORKLOADS:
        table = Table(
            f"Retained memory, {workload.name}: {workload.requests} requests of "
            f"{workload.prompts[0]} to {workload.prompts[1]} + {workload.outputs[0]} to "
            f"{workload.outputs[1]} tokens, {workload.concurrency} at a time",
            [
                "policy, variant",
                "blocks a request",
                "peak",
                "vs naive",
                "packed bound",
                "over bound",
                "goal",
                "utilisation",
                "F",
                "blocks ≤ 25%",
                "≤ 50%",
                "≤ 75%",
                "≤ 100%",
                "moved tokens",
                "tokens = naive",
            ],
            [],
        )
        for row in sorted((r for r in rows if r["workload"] == workload.name), key=_by_policy):
            memory, naive = row["memory"], find(rows, row, "naive-evict")
            saved = None
            if naive is not None and naive is not row:
                ratio = memory["blocks_per_request"] / naive["memory"]["blocks_per_request"]
                saved = f"{ratio - 1:+.1%}"
            equal = row["tokens_equal_naive"]
            table.rows.append(
                [
                    f"{row['policy']}, {row['variant']}",
                    memory["blocks_per_request"],
                    memory["peak_blocks_per_request"],
                    saved,
                    memory["bound_per_request"],
                    f"{memory['over_bound_ratio']:+.1%}",
                    _goal(row),
                    f"{1 - memory['f']:.1%}",
                    f"{memory['f']:.1%}",
                    *[f"{share:.0%}" for share in memory["bins_ratio"]],
                    row.get("moved_tokens"),
                    None if naive is None or naive is row else "yes" if equal else "no",
                ]
            )
        tables.append(table)
    tables[-1].notes = [
        f"paper: {PAPER['retained']}; utilisation {PAPER['utilisation']}; {PAPER['f']}",
        "goal: eager within 2% of the packed bound Σ ceil(live / S), live counted at the sample",
    ]
    return tables


def _goal(row: dict[str, Any]) -> str | None:
    if "eager" not in row["variant"]:
        return None
    met = row["memory"]["over_bound_ratio"] <= BOUND_GOAL
    return f"{BOUND_GOAL:.0%} {'met' if met else 'missed'}"


def _by_policy(row: dict[str, Any]) -> tuple[int, str]:
    return (row["policy"] != "none", row["policy"])
