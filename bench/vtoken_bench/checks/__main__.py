"""`python -m vtoken_bench.checks NAME… [--tiny] [--device D]`; NAME is one of CHECKS."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import Any

import torch

from vtoken_bench.checks.cases import Shape

CHECKS = ("pages", "copies", "overlap", "probe", "parking")
TINY: dict[str, dict[str, Any]] = {
    "pages": {"batches": (2,), "contexts": (40,)},
    "copies": {"layers": 2, "tokens": (1, 5, 20)},
    "overlap": {"layers": 2, "tokens": 8, "steps": 2, "width": 16},
    "probe": {"batches": (2,), "contexts": (70,)},
    "parking": {"layers": 2, "tokens": (1, 20), "repeats": 1},
}
# For the interpreter, which is slow and rounds differently. A device uses the serving shape.
INTERPRETED = Shape(heads=2, query_heads=4, dim=16, dtype=torch.float32)
SHAPED = ("pages", "probe", "parking")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vtoken_bench.checks", description=__doc__)
    parser.add_argument("checks", nargs="+", choices=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu in Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for correctness only")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --tiny checks correctness only")
    results = []
    for name in args.checks:
        module = import_module(f"vtoken_bench.checks.{name}")
        sizes = TINY[name] if args.tiny else {}
        if args.tiny and name in SHAPED and device.type == "cpu":
            sizes = sizes | {"shape": INTERPRETED}
        results.append(module.run(device, **sizes))
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
