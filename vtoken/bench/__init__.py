"""Benchmarks: `vtoken bench NAME`. Ratios are measured side by side in one run, never alone."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from vtoken.bench import comparison
from vtoken.bench.output import FOLDER, PAGES, publish
from vtoken.bench.report import as_report, read_results

BENCHES = {
    "planner": "µs a step of the core alone: nothing due, steady state, full plans",
    "growth": "how the core's cost grows with requests and tokens, and bytes a token",
    "telemetry": "what the stream of state costs the engine at 70,000 blocks",
    "stream": "bytes and frames a client, CPU of the server and the engine's share, 70,000 blocks",
    "evaluation": "the paper's section 5: memory, throughput, capacity, cost, sensitivity",
    "console": "first paint, key to reaction, memory, bytes and CPU of the console",
    "overhead": "plugin against stock vLLM, paired",
    "gpu": "the open checks of docs/gpu.md, on a CUDA device",
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
    pages = ", ".join(map(str, PAGES))
    results = sub.add_parser(
        "results", help=f"keep the last runs in docs/results/, with charts; fill in {pages}"
    )
    results.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files are")
    results.add_argument("--file", type=Path, nargs="+", default=PAGES, help="the pages")
    report = sub.add_parser("report", help="write all results of the last runs into one file")
    report.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files are")
    report.add_argument("--file", type=Path, help=f"the report (default {FOLDER}/report.md)")
    compare = sub.add_parser("compare", help=comparison.SUMMARY, description=comparison.SUMMARY)
    for name in ("old", "new"):
        compare.add_argument(name, type=Path, help="a JSON file, or a folder of them")
    args = parser.parse_args(argv)
    if args.name == "results":
        return _results(args)
    if args.name == "report":
        return _report(args)
    if args.name == "compare":
        return comparison.run(args)
    code: int = import_module(f"vtoken.bench.{args.name}").run(args)
    return code


def _results(args: argparse.Namespace) -> int:
    """Publish the last runs on every page; 1 if charts could not be drawn."""
    code = 0
    for page in args.file:
        try:
            for line in publish(page, args.folder):
                print(line, file=sys.stderr)
        except ImportError as error:
            print(f"{page}: charts not drawn (the extra `plots`): {error}", file=sys.stderr)
            code = 1
    return code


def _report(args: argparse.Namespace) -> int:
    results = read_results(args.folder)
    if not results:
        print(f"vtoken bench report: no result in {args.folder}", file=sys.stderr)
        return 1
    path: Path = args.file or args.folder / "report.md"
    path.write_text(as_report(results))
    print(f"written to {path}: {', '.join(results)}")
    return 0
