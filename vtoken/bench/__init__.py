"""Benchmarks: `vtoken bench NAME`. Ratios are measured side by side in one run, never alone."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vtoken bench", description=__doc__)
    sub = parser.add_subparsers(dest="name", required=True)
    overhead = sub.add_parser("overhead", help="plugin against stock vLLM, paired")
    overhead.add_argument("--rounds", type=int, default=7, help="pairs of every variant")
    overhead.add_argument("--new-tokens", type=int, default=256)
    overhead.add_argument("--requests", type=int, default=8)
    overhead.add_argument("--model", help="a model folder (default: the demo model)")
    overhead.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args(argv)
    from vtoken.bench.overhead import run

    return run(args)
