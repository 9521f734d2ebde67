"""Latency and cost of the console: first paint, key to reaction, memory, bytes, CPU.

The real `vtoken console` runs in a pty of 200 x 50, on the server of `vtoken bench stream` with
70,000 blocks and 256 requests, at 10 frames a second. It is measured from outside, through its pty
and as a process: once with a terminal that reads at once, once behind a link of 64 kB/s.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from vtoken_bench.output import FOLDER, Cell, Table, finish, new_result
from vtoken_bench.stream import NUM_BLOCKS
from vtoken_bench.terminal import Terminal

SIZE = (200, 50)
NUM_REQUESTS = 256
POOL_SHOWN = "pool · "  # the panel's title once there is a snapshot, and after a help page
SETTLE_S = 2.0  # from the first data to the first measurement
CACHE = FOLDER / "bytecode"
QUIET_FPS = "0.1"  # so low that output after a key is the reaction to it
LINK_KB_PER_S = 64.0

# Figures of one start of the console, by their names in a table, with goals where the terminal
# reads at once. CPU time depends less on other load than elapsed time.
PAINT, PAINT_CPU, DATA = "first paint, s", "CPU time of it, s", "first data, s"
KEY, PAGE = (
    "arrow key to its cursor, ms",
    "? to the help page, ms",
)  # without traffic, with all of it
MEMORY, SPEED = "memory (RSS), MB", "to the terminal, kB/s"
FRAMES, FRAME, CPU = "frames a second", "a frame, kB", "CPU, % of one core"
FIGURES = (PAINT, PAINT_CPU, DATA, KEY, PAGE, MEMORY, SPEED, FRAMES, FRAME, CPU)
GOALS = {PAINT: 0.6, KEY: 50.0, PAGE: 50.0, MEMORY: 120.0, SPEED: 300.0}
Figures = dict[str, list[float]]


def _console(url: str, fps: str, link_kb_per_s: float | None = None) -> Terminal:
    # An installed package has its bytecode; a checkout gets it in a cache of the benchmark.
    argv = ["env", "-u", "PYTHONDONTWRITEBYTECODE", sys.executable, "-m", "vtoken.cli"]
    argv += ["console", "--url", url, "--fps", fps]
    link = None if link_kb_per_s is None else link_kb_per_s * 1e3
    return Terminal(argv, *SIZE, {"PYTHONPYCACHEPREFIX": str(CACHE.resolve())}, link)


def _warm_up(url: str) -> None:
    """Start the console once, unmeasured, to write the bytecode."""
    console = _console(url, "10")
    try:
        console.wait_for(POOL_SHOWN, limit_s=60)
        mark = console.mark()
        console.type(b"?")
        console.wait_for("help: esc", mark)
    finally:
        console.close()


def _watch(console: Terminal, watch_s: float) -> Figures:
    """Figures of a console that shows its data and gets no key; memory is the highest sample."""
    time.sleep(SETTLE_S)
    began, cpu, written = time.monotonic(), console.cpu_s(), console.num_bytes
    frames, rss = console.num_frames, 0
    while time.monotonic() < began + watch_s:
        rss = max(rss, console.rss_bytes())
        time.sleep(0.2)
    spent = time.monotonic() - began
    written, frames = console.num_bytes - written, console.num_frames - frames
    return {
        MEMORY: [rss / 1e6],
        SPEED: [written / spent / 1e3],
        FRAMES: [frames / spent],
        FRAME: [written / frames / 1e3] if frames else [],
        CPU: [(console.cpu_s() - cpu) / spent * 100],
    }


def _measure(url: str, watch_s: float, num_keys: int, link_kb_per_s: float | None) -> Figures:
    console = _console(url, "10", link_kb_per_s)
    try:
        painted = console.wait_for("vToken") - console.started
        paint_cpu = console.cpu_s()
        data = console.wait_for(POOL_SHOWN) - console.started
        watched = _watch(console, watch_s)
        pages = []
        for _ in range(num_keys):
            mark = console.mark()
            typed = console.type(b"?")
            pages.append((console.wait_for("help: esc", mark) - typed) * 1e3)
            mark = console.mark()
            console.type(b"?")
            console.wait_for(POOL_SHOWN, mark)
            time.sleep(0.25)
        watched[MEMORY].append(console.rss_bytes() / 1e6)
    finally:
        console.close()
    return {
        PAINT: [painted],
        PAINT_CPU: [paint_cpu],
        DATA: [data],
        KEY: _keys(url, num_keys, link_kb_per_s),
        PAGE: pages,
        **watched,
    }


def _keys(url: str, num_keys: int, link_kb_per_s: float | None) -> list[float]:
    console = _console(url, QUIET_FPS, link_kb_per_s)
    times = []
    try:
        console.wait_for(POOL_SHOWN, limit_s=60)
        time.sleep(SETTLE_S)
        for number in range(num_keys):
            mark = console.mark()
            typed = console.type(b"\x1b[B" if number % 2 == 0 else b"\x1b[A")
            times.append((console.wait_for_any(mark) - typed) * 1e3)
            time.sleep(0.3)
    finally:
        console.close()
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=5, help="starts of the console (5)")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    watch_s, num_keys, runs = (2.0, 3, 1) if args.quick else (10.0, 15, args.runs)
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    setup: dict[str, str | int] = {
        "load before": load,
        "blocks": NUM_BLOCKS,
        "requests": NUM_REQUESTS,
        "terminal": "200x50, truecolor",
        "runs": runs,
    }
    result = new_result("console", "make bench-console", setup)
    with _server() as url:
        _warm_up(url)
        found = [
            {link: _measure(url, watch_s, num_keys, link) for link in (None, LINK_KB_PER_S)}
            for _ in range(runs)
        ]
    result.tables = [
        figures_table([one[link] for one in found], link) for link in (None, LINK_KB_PER_S)
    ]
    result.raw = [{str(link): figures for link, figures in one.items()} for one in found]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


@contextmanager
def _server() -> Iterator[str]:
    """The URL of a busy server, in processes of its own."""
    command = [sys.executable, "-m", "vtoken_bench.stream", str(NUM_REQUESTS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield f"http://{server.stdout.readline().strip()}"


def figures_table(runs: Sequence[Figures], link_kb_per_s: float | None) -> Table:
    """One link's figures."""
    goals: dict[str, float] = {}
    where, notes = f", behind a link of {link_kb_per_s:g} kB/s" if link_kb_per_s else "", []
    if link_kb_per_s is None:
        goals = GOALS
        notes = [
            "goals are held against elapsed time: other work on the machine counts in",
            "met, missed: all measurements are on that side of the goal; else undecided",
            "a free core paints first within little more than the CPU time of the first paint",
        ]
    title = f"70,000 blocks, 10 frames a second, 200 x 50{where}"
    return Table.of(title, [_row(name, runs, goals.get(name)) for name in FIGURES], *notes)


def _row(name: str, runs: Sequence[Figures], goal: float | None) -> dict[str, Cell]:
    values = [value for one in runs for value in one[name]]
    return {
        "figure": name,
        "median": median(values),
        "lowest": min(values),
        "95%": _p95(values),
        "highest": max(values),
        "goal": None if goal is None else f"< {goal:g}",
        "": None if goal is None else _verdict(values, goal),
    }


def _p95(values: list[float]) -> float:
    """The smallest value that at least 95% of the values do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _verdict(values: list[float], goal: float) -> str:
    if max(values) < goal:
        return "met"
    return "missed" if min(values) >= goal else "undecided"
