"""How the core's cost grows with requests, context, pool and block size.

Bytes are sizes of real objects, measured when half of all tokens are dead: tables and pool in the
scheduler's process, mirrors in the worker's. They exclude vLLM's own bookkeeping and the signals
that a worker keeps for a policy.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.decoding import (
    BLOCK_SIZE,
    HEAD_SIZE,
    KV_BYTES,
    KV_HEADS,
    LAYERS,
    Blocks,
    Decoding,
)
from vtoken_bench.output import Table, finish, new_result
from vtoken_bench.planner import PARTS, PAUSED, PERIOD, Measure, evict_half, in_rounds, quiet
from vtoken_bench.sizes import deep_bytes

MEASURED: dict[str, Callable[..., Measure]] = {
    "nothing due": partial(quiet, {}, fragment=False),
    "holes, recycling": partial(quiet, PAUSED, fragment=True),
    f"{PERIOD} evictions every {PERIOD} steps, mean": partial(in_rounds, "streaming_llm"),
}
Timings = dict[str, list[list[float]]]  # by situation: µs of `PARTS` of every step
GOAL_BYTES = 16  # per token, both processes; the paper's bound
ROUNDS, MOST_REPEATED_TOKENS = 3, 64 * 16_384  # larger sizes are measured once, to save time
GPU_REQUESTS, GPU_TOKENS = 256, 131_072  # the size of the calculated table
GPU_STEPS_MS = (10, 30)


@dataclass(frozen=True, slots=True, order=True)
class Size:
    requests: int
    tokens: int
    block_size: int = BLOCK_SIZE
    pool: int = 1  # the pool's blocks, as a multiple of those that the requests need

    @property
    def total(self) -> int:
        """Tokens of all requests."""
        return self.requests * self.tokens

    @property
    def slots(self) -> int:
        return self.total * self.pool

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.block_size, self.pool)


@dataclass(frozen=True, slots=True)
class Steps:
    """µs a step of one situation. `parts`: medians of `PARTS`."""

    median: float
    p10: float
    p90: float
    minimum: float
    parts: list[float]

    @classmethod
    def of(cls, us: list[list[float]]) -> Steps:
        steps = np.array(us).sum(axis=1)
        p10, median, p90 = np.percentile(steps, [10, 50, 90]).tolist()
        return cls(median, p10, p90, float(steps.min()), np.median(us, axis=0).tolist())


@dataclass(frozen=True, slots=True)
class Cell:
    """Measurements of one size. `us`: by situation. `skipped`: why there are none."""

    size: Size
    us: dict[str, Steps]
    table_bytes: float = 0.0  # per token, in the scheduler's process
    mirror_bytes: float = 0.0  # per token, in the worker's
    skipped: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = partial(parser.add_argument, type=int, nargs="+")
    add("--requests", default=[1, 16, 64, 256, 1024])
    add("--tokens", default=[1024, 4096, 16_384, 131_072])
    add("--pools", default=[1, 4, 16], help="blocks of the pool / blocks needed, at --base")
    add("--block-sizes", default=[16, 32, 64, 128], help="at --base")
    parser.add_argument(
        "--base", type=int, nargs=2, default=[64, 16_384], metavar=("REQUESTS", "TOKENS"),
        help="the size that all curves share",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=160, help="timed steps a situation")
    parser.add_argument(
        "--memory-gb", type=float, default=4.0, help="skip sizes that would need more"
    )


def run(args: argparse.Namespace) -> int:
    started, before = time.monotonic(), os.getloadavg()[0]
    if args.quick:
        args.requests, args.tokens, args.base = [1, 64], [1024, 4096], [64, 4096]
        args.pools, args.block_sizes = [1, 4], [16, 64]
    base = Size(*args.base)
    sizes = {Size(r, t) for r in args.requests for t in args.tokens} | {base}
    sizes |= {Size(base.requests, t) for t in args.tokens}
    sizes |= {Size(r, base.tokens) for r in args.requests}
    sizes |= {Size(base.requests, base.tokens, pool=pool) for pool in args.pools}
    sizes |= {Size(base.requests, base.tokens, block_size=size) for size in args.block_sizes}
    rounds = 1 if args.quick else ROUNDS
    cells = _measure_all(sizes, args.steps, rounds, args.memory_gb * 1e9)
    load = f"{before:.1f} on {os.cpu_count()} cores"
    setup = {"timed steps": args.steps, "rounds": rounds, "load before": load}
    result = new_result("growth", "make bench-growth", setup)
    result.tables = [_table(cells), *_calculated(cells)]
    result.charts = _charts(cells, base)
    result.raw = {"parts": PARTS, "cells": [asdict(cell) for cell in cells]}
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _measure_all(
    sizes: Iterable[Size], num_steps: int, num_rounds: int, limit: float
) -> list[Cell]:
    """Measure every size that needs fewer than `limit` bytes.

    Small sizes are measured in every round, seconds apart, because other load slows the machine
    down for a second or two at a time.
    """
    cells: list[Cell] = []
    timings: dict[Size, Timings] = {}
    ascending = sorted(sizes, key=lambda size: (size.slots, size))
    for _ in range(num_rounds - 1):
        for size in sorted(ascending, key=lambda size: (size.total, size)):
            if size.total <= MOST_REPEATED_TOKENS:
                _time(size, num_steps, timings)
    baseline, slot_bytes = _peak_rss_bytes(), 0.0
    for size in ascending:
        if size.slots * slot_bytes > limit:
            why = f"about {size.slots * slot_bytes / 1e9:.1f} GB"
            cells.append(Cell(size, {}, skipped=why))
            continue
        _time(size, num_steps, timings)
        gc.collect()
        us = {name: Steps.of(found) for name, found in timings[size].items()}
        cell = Cell(size, us, *bytes_a_token(size))
        cells.append(cell)
        # Sizes ascend, so this one set the peak. Assume at least twice the bytes that it keeps.
        kept = 2 * (cell.table_bytes + cell.mirror_bytes) / size.pool
        slot_bytes = max(kept, (_peak_rss_bytes() - baseline) / size.slots)
    return sorted(cells, key=lambda cell: cell.size)


def _peak_rss_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _time(size: Size, num_steps: int, timings: dict[Size, Timings]) -> None:
    """Time every situation at `size`, each on a new engine, and add to `timings`."""
    found = timings.setdefault(size, {})
    for name, situation in MEASURED.items():
        gc.collect()
        measure = situation(blocks=size.blocks)
        found.setdefault(name, []).extend(measure(size.requests, size.tokens, num_steps))


def bytes_a_token(size: Size) -> tuple[float, float]:
    """Bytes a token in the scheduler's process and in the worker's, half of the tokens dead."""
    engine = Decoding(
        size.requests, size.tokens, PAUSED, borrows_blocks=False, mirrored=True, blocks=size.blocks
    )
    evict_half(engine, size.tokens)
    engine.steps(2)
    tables, mirrors = engine.calls.token_state()
    shared = [engine.store]
    return (
        deep_bytes([tables], excluded=shared) / size.total,
        deep_bytes([mirrors], excluded=[*shared, engine.runtime]) / size.total,
    )


def _table(cells: list[Cell]) -> Table:
    table = Table(
        "µs a step (CPU time) and bytes a token",
        [
            "requests x tokens",
            "block size",
            "pool",
            *MEASURED,
            "tables, B",
            "mirrors, B",
            "both",
            f"goal {GOAL_BYTES}",
        ],
        [],
        [
            "median [10th .. 90th percentile] over the steps; of evictions over means of "
            f"{PERIOD} steps",
            "pool: blocks of the pool / blocks that the requests need before anything is evicted",
        ],
    )
    for cell in cells:
        size = cell.size
        about = [f"{size.requests:,} x {size.tokens:,}", str(size.block_size), f"{size.pool}x"]
        if cell.skipped:
            rest = [None] * (len(table.columns) - 4)
            table.rows.append([*about, f"left out: {cell.skipped}", *rest])
            continue
        both = cell.table_bytes + cell.mirror_bytes
        us = [f"{s.median:,.0f} [{s.p10:,.0f} .. {s.p90:,.0f}]" for s in cell.us.values()]
        met = "met" if both <= GOAL_BYTES else "missed"
        table.rows.append([*about, *us, cell.table_bytes, cell.mirror_bytes, both, met])
    return table


def _calculated(cells: list[Cell]) -> list[Table]:
    """Calculate the share of a GPU's step from the measured cell; no table if it is missing."""
    wanted = Size(GPU_REQUESTS, GPU_TOKENS)
    cell = next((c for c in cells if c.size == wanted and not c.skipped), None)
    if cell is None:
        return []
    name = f"{GPU_REQUESTS} x {GPU_TOKENS:,}"
    shares = [f"% of a step of {ms} ms" for ms in GPU_STEPS_MS]
    table = Table(
        f"Calculated, not measured: {GPU_REQUESTS} requests of {GPU_TOKENS:,} tokens on a GPU",
        ["", "value", *shares, "from"],
        [],
        [
            f"measured: the row {name} above, with the CPU of this run",
            f"steps of {' and '.join(map(str, GPU_STEPS_MS))} ms are assumed; no GPU was measured",
            f"K and V: {LAYERS} layers, {KV_HEADS} heads of {HEAD_SIZE}, bfloat16 (Llama-3.1-8B)",
        ],
    )
    for situation, steps in cell.us.items():
        of_steps = [f"{steps.median / ms / 10:.1f}" for ms in GPU_STEPS_MS]
        row = [f"scheduler: {situation}", f"{steps.median:,.0f} µs a step", *of_steps]
        table.rows.append([*row, "measured, median"])
    total = wanted.total
    kv_bytes = KV_BYTES * total
    for what, a_token in (
        ("tables and pool", cell.table_bytes),
        ("mirrors, in each worker", cell.mirror_bytes),
    ):
        source = f"requests x tokens x {a_token:.1f} B, measured"
        table.rows.append([what, f"{a_token * total / 1e6:,.0f} MB", None, None, source])
    source = f"requests x tokens x {KV_BYTES:,} B"
    table.rows.append(["K and V, nothing evicted", f"{kv_bytes / 1e9:,.0f} GB", None, None, source])
    both = 100 * (cell.table_bytes + cell.mirror_bytes) / KV_BYTES
    table.rows.append(["tables, pool and mirrors", f"{both:.3f}% of K and V", None, None, ""])
    return [table]


def _charts(cells: list[Cell], base: Size) -> list[Chart]:
    """µs a step, and bytes a token, over each of the four axes through `base`."""
    axes = {
        "requests": (f"requests of {base.tokens:,} tokens", "requests"),
        "tokens": (f"{base.requests:,} requests", "tokens a request"),
        "pool": (
            f"{base.requests:,} x {base.tokens:,}, pool",
            "blocks of the pool / blocks needed",
        ),
        "block_size": (f"{base.requests:,} x {base.tokens:,}, block size", "slots a block"),
    }
    us_panels, byte_panels = [], []
    for name, (title, label) in axes.items():
        found = [c for c in cells if not c.skipped and _on_axis(c.size, base, name)]
        found.sort(key=lambda cell: cell.size)
        x = [float(getattr(cell.size, name)) for cell in found]
        us = Panel(title, label, "µs a step", x_scale="log", y_scale="log")
        for situation in MEASURED:
            steps = [cell.us[situation] for cell in found]
            us.lines.append(
                Line(
                    situation,
                    x,
                    [s.median for s in steps],
                    [s.p10 for s in steps],
                    [s.p90 for s in steps],
                )
            )
        kept = Panel(title, label, "bytes a token", x_scale="log")
        kept.lines = [
            Line("both processes", x, [cell.table_bytes + cell.mirror_bytes for cell in found]),
            Line("tables and pool, scheduler", x, [cell.table_bytes for cell in found]),
            Line("mirrors, worker", x, [cell.mirror_bytes for cell in found]),
            Line(
                f"goal of both processes, {GOAL_BYTES}",
                [x[0], x[-1]],
                [GOAL_BYTES] * 2,
                reference=True,
            ),
        ]
        us_panels.append(us)
        byte_panels.append(kept)
    through = f"through {base.requests} requests of {base.tokens:,} tokens"
    return [
        Chart(f"µs a step, median with 10th to 90th percentile, {through}", us_panels),
        Chart(f"Bytes a token, {through}", byte_panels, part="bytes"),
    ]


def _on_axis(size: Size, base: Size, name: str) -> bool:
    """Whether `size` differs from `base` in no field but `name`."""
    fields = ("requests", "tokens", "pool", "block_size")
    return all(getattr(size, f) == getattr(base, f) for f in fields if f != name)
