"""Benchmarks: `vtoken bench NAME`. Ratios are measured side by side in one run, never alone."""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib import import_module
from pathlib import Path

from vtoken.bench.output import FOLDER, PAGES, fill_in

BENCHES = {
    "planner": "µs a step of the core alone: nothing due, steady state, full plans",
    "growth": "how the core's cost grows with requests and tokens, and bytes a token",
    "telemetry": "what the stream of state costs the engine at 70,000 blocks",
    "stream": "bytes and frames a client, CPU of the server and the engine's share, 70,000 blocks",
    "capacity": "largest concurrency in a fixed pool, throughput under an SLA",
    "memory": "blocks held by native, naive-evict and vToken; shared prefixes",
    "console": "first paint, key to reaction, memory, bytes and CPU of the console",
    "overhead": "plugin against stock vLLM, paired",
    "client": "native, naive-evict and vToken as servers under a real client, vllm bench serve",
    "quality": "answers of evicted caches against the full cache: RULER's tasks, continuations",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vtoken bench", description=__doc__)
    sub = parser.add_subparsers(dest="name", required=True)
    for name, summary in BENCHES.items():
        bench = sub.add_parser(name, help=summary, description=summary)
        bench.add_argument("--quick", action="store_true", help="a short run, to see that it works")
        bench.add_argument("--json", type=Path, help=f"the file (default {FOLDER}/{name}.json)")
        bench.add_argument("--markdown", action="store_true", help="print Markdown tables")
        import_module(f"vtoken.bench.{name}").add_arguments(bench)
    pages = " and ".join(map(str, PAGES))
    results = sub.add_parser("results", help=f"write the tables of the last runs into {pages}")
    results.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files are")
    results.add_argument("--file", type=Path, nargs="+", default=PAGES, help="the pages")
    args = parser.parse_args(argv)
    if args.name == "results":
        return _results(args)
    code: int = import_module(f"vtoken.bench.{args.name}").run(args)
    return code


def _results(args: argparse.Namespace) -> int:
    """Write the tables of the last runs between the markers of the pages; plots beside them."""
    for page in args.file:
        text, filled, missing = fill_in(page.read_text(), args.folder)
        page.write_text(text)
        for name in filled:
            if (plot := args.folder / f"{name}.svg").exists():
                shutil.copyfile(plot, page.parent / plot.name)
        for name in missing:
            print(f"{name}: no {args.folder}/{name}.json, section left as it was", file=sys.stderr)
    return 0
