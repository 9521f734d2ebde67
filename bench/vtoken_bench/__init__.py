"""Benchmarks: `vtoken bench NAME`. Every ratio compares measurements of the same run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from vtoken_bench import comparison
from vtoken_bench.machine_lock import MachineBusyError, machine_held
from vtoken_bench.output import FOLDER, KEPT, publish
from vtoken_bench.page import CONTENTS, PAGE, contents, page

BENCHES = {
    "planner": "µs a step of the core alone: nothing due, steady state, full plans",
    "telemetry": "engine time that telemetry takes at 70,000 blocks",
    "stream": "bytes and frames per client, CPU of API server and engine, at 70,000 blocks",
    "evaluation": "vToken beside native vLLM: memory, causes, floors, pressure, parking, turns",
    "console": "first paint, key latency, memory, bytes and CPU of the console",
    "overhead": "the plugin against stock vLLM, in paired slices",
    "drafters": "a draft model beside eviction, at half the memory",
    "gpu": "the open checks of docs/gpu.md, on a CUDA device",
    "host": "host time of a GPU's step by code, and what a step launches, without a GPU",
    "client": "native vLLM, naive-evict and vToken as servers under `vllm bench serve`",
    "grounds": "facts found under eviction on held-out texts, paired with the full cache",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vtoken bench", description=__doc__)
    sub = parser.add_subparsers(dest="name", required=True)
    for name, summary in BENCHES.items():
        bench = sub.add_parser(name, help=summary, description=summary)
        bench.add_argument("--quick", action="store_true", help="a short run, as a smoke test")
        bench.add_argument("--json", type=Path, help=f"JSON file (default {FOLDER}/{name}.json)")
        bench.add_argument("--markdown", action="store_true", help="print Markdown tables")
        import_module(f"vtoken_bench.{name}").add_arguments(bench)
    results = sub.add_parser(
        "results", help=f"copy the last runs to {KEPT}, draw their charts, write {PAGE}"
    )
    results.add_argument("names", nargs="*", help=f"files (default: all that {CONTENTS} names)")
    results.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files are")
    compare = sub.add_parser("compare", help=comparison.SUMMARY, description=comparison.SUMMARY)
    for name in ("old", "new"):
        compare.add_argument(name, type=Path, help="a JSON file or a folder of JSON files")
    args = parser.parse_args(argv)
    if args.name == "results":
        return _results(args)
    if args.name == "compare":
        return comparison.run(args)
    reports = getattr(args, "results", None) is not None  # `gpu`: of what another machine measured
    try:
        with machine_held(args.name, measures=not (args.quick or reports)):
            code: int = import_module(f"vtoken_bench.{args.name}").run(args)
    except MachineBusyError as error:
        print(f"vtoken bench {args.name}: {error}", file=sys.stderr)
        return 1
    return code


def _results(args: argparse.Namespace) -> int:
    """Publish the last runs, and write the page. Return 1 if charts could not be drawn."""
    shown = contents()
    unknown = [name for name in args.names if name not in shown.files]
    if unknown:
        print(f"{CONTENTS} does not name {', '.join(unknown)}", file=sys.stderr)
        return 1
    try:
        for line in publish(args.names or shown.files, args.folder, KEPT):
            print(line, file=sys.stderr)
    except ImportError as error:
        print(f"no charts, install matplotlib: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(page(shown, KEPT))
    return 0
