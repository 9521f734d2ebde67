"""Benchmarks: `vtoken bench NAME`. Every ratio compares measurements of the same run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from vtoken_bench import comparison
from vtoken_bench.machine_lock import MachineBusyError, machine_held
from vtoken_bench.output import FOLDER, PAGES, publish
from vtoken_bench.report import as_report, read_results

BENCHES = {
    "planner": "µs a step of the core alone: nothing due, steady state, full plans",
    "growth": "how the core's cost grows with requests and tokens, and bytes a token",
    "telemetry": "engine time that telemetry takes at 70,000 blocks",
    "stream": "bytes and frames per client, CPU of API server and engine, at 70,000 blocks",
    "evaluation": "the paper's section 5: memory, throughput, capacity, cost, sensitivity",
    "console": "first paint, key latency, memory, bytes and CPU of the console",
    "overhead": "the plugin against stock vLLM, in paired slices",
    "gpu": "the open checks of docs/gpu.md, on a CUDA device",
    "host": "host time of a GPU's step by code, and what a step launches, without a GPU",
    "client": "native vLLM, naive-evict and vToken as servers under `vllm bench serve`",
    "grounds": "facts found under eviction on held-out texts, paired with the full cache",
    "speculation": "native vLLM and vToken, with and without drafts, at half the memory",
    "quality": "quality under eviction against the full cache: RULER tasks, continuations",
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
    pages = ", ".join(map(str, PAGES))
    results = sub.add_parser(
        "results", help=f"copy the last runs to docs/results/, draw their charts, update {pages}"
    )
    results.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files are")
    results.add_argument("--file", type=Path, nargs="+", default=PAGES, help="the pages to update")
    report = sub.add_parser("report", help="write all results of the last runs into one file")
    report.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files are")
    report.add_argument("--file", type=Path, help=f"the report (default {FOLDER}/report.md)")
    compare = sub.add_parser("compare", help=comparison.SUMMARY, description=comparison.SUMMARY)
    for name in ("old", "new"):
        compare.add_argument(name, type=Path, help="a JSON file or a folder of JSON files")
    args = parser.parse_args(argv)
    if args.name == "results":
        return _results(args)
    if args.name == "report":
        return _report(args)
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
    """Publish the last runs on every page. Return 1 if charts could not be drawn."""
    try:
        for line in publish(args.file, args.folder):
            print(line, file=sys.stderr)
    except ImportError as error:
        print(f"no charts, install matplotlib: {error}", file=sys.stderr)
        return 1
    return 0


def _report(args: argparse.Namespace) -> int:
    results = read_results(args.folder)
    if not results:
        print(f"vtoken bench report: no result in {args.folder}, run a bench", file=sys.stderr)
        return 1
    path: Path = args.file or args.folder / "report.md"
    path.write_text(as_report(results))
    print(f"written to {path}: {', '.join(results)}")
    return 0
