"""How the core's cost grows with requests and with tokens: µs a step, and bytes a token.

Bytes are those of the real objects in both processes, counted when half of all tokens are dead:
tables and pool in the scheduler's, mirrors in the worker's. vLLM's own books do not count, and
neither do the signals that a worker keeps for a policy.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from dataclasses import asdict, dataclass

import numpy as np

from vtoken.bench.decoding import BLOCK_SIZE, Decoding
from vtoken.bench.output import Table, finish, new_result
from vtoken.bench.planner import PAUSED, PERIOD, evict_half, in_rounds, quiet
from vtoken.bench.sizes import deep_bytes

MEASURED = {
    "nothing due": quiet({}, fragment=False),
    "holes, recycling": quiet(PAUSED, fragment=True),
    f"{PERIOD} evictions every {PERIOD} steps, mean": in_rounds("streaming_llm"),
}
GOAL_BYTES = 16  # a token, both processes; the paper's bound


@dataclass(frozen=True, slots=True)
class Cell:
    """One size. `us`: medians and minimums a step by situation. `skipped`: why nothing is here."""

    requests: int
    tokens: int
    us: dict[str, tuple[float, float]]
    table_bytes: float = 0.0  # a token, in the scheduler's process
    mirror_bytes: float = 0.0  # a token, in the worker's
    skipped: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384, 131_072])
    parser.add_argument("--steps", type=int, default=64, help="timed steps a situation")
    parser.add_argument(
        "--memory-gb", type=float, default=6.0, help="sizes that would take more are left out"
    )


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.quick:
        args.requests, args.tokens = [1, 64], [4096]
    cells: list[Cell] = []
    limit, first, a_token = args.memory_gb * 1e9, _most_memory(), 0.0
    sizes = sorted((r * t, r, t) for r in args.requests for t in args.tokens)
    for total, num_requests, num_tokens in sizes:
        if total * a_token > limit:
            why = f"about {total * a_token / 1e9:.1f} GB"
            cells.append(Cell(num_requests, num_tokens, {}, skipped=why))
            continue
        cell = _measure(num_requests, num_tokens, args.steps)
        cells.append(cell)
        # Sizes ascend, so this one took the most so far: at least twice what it keeps.
        kept = 2 * (cell.table_bytes + cell.mirror_bytes)
        a_token = max(kept, (_most_memory() - first) / total)
    setup = {"block size": BLOCK_SIZE, "timed steps": args.steps}
    result = new_result("growth", "make bench-growth", setup)
    result.tables = [_table(sorted(cells, key=lambda cell: (cell.tokens, cell.requests)))]
    result.raw = [asdict(cell) for cell in cells]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _most_memory() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure(num_requests: int, num_tokens: int, num_steps: int) -> Cell:
    us = {}
    for name, measure in MEASURED.items():
        gc.collect()
        steps = np.array(measure(num_requests, num_tokens, num_steps)).sum(axis=1)
        us[name] = float(np.median(steps)), float(steps.min())
    gc.collect()
    return Cell(num_requests, num_tokens, us, *bytes_a_token(num_requests, num_tokens))


def bytes_a_token(num_requests: int, num_tokens: int) -> tuple[float, float]:
    """Bytes a token in the scheduler's process and in the worker's, half of the tokens dead."""
    engine = Decoding(num_requests, num_tokens, PAUSED, lends_blocks=False, mirrored=True)
    evict_half(engine, num_tokens)
    engine.steps(2)
    total = num_requests * num_tokens
    tables, mirrors = engine.calls.kept()
    theirs = [engine.store]
    return (
        deep_bytes([tables], of_others=theirs) / total,
        deep_bytes([mirrors], of_others=[*theirs, engine.runtime]) / total,
    )


def _table(cells: list[Cell]) -> Table:
    table = Table(
        "µs a step (CPU time, median / minimum) and bytes a token",
        ["requests x tokens", *MEASURED, "tables, B", "mirrors, B", "both", f"goal {GOAL_BYTES}"],
        [],
    )
    for cell in cells:
        name = f"{cell.requests:,} x {cell.tokens:,}"
        if cell.skipped:
            rest = [None] * (len(table.columns) - 2)
            table.rows.append([name, f"left out: {cell.skipped}", *rest])
            continue
        both = cell.table_bytes + cell.mirror_bytes
        us = [f"{middle:,.0f} / {least:,.0f}" for middle, least in cell.us.values()]
        met = "met" if both <= GOAL_BYTES else "missed"
        table.rows.append([name, *us, cell.table_bytes, cell.mirror_bytes, both, met])
    return table
