"""The soak test, `python -m tests.soak`: real engines under random traffic, all checks on."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> int:
    """Exit code 0 if there was no violation, failure, lost request or wrong token; else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="total duration (20)")
    parser.add_argument("--phase-seconds", type=float, default=75.0, help="of one phase (75)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--only", metavar="TEXT", help="engines whose name contains TEXT")
    parser.add_argument("--steps", type=int, metavar="N", help="run one phase for N rounds")
    parser.add_argument("--no-server", action="store_true", help="skip the HTTP phase")
    parser.add_argument("--logs", type=Path, default=Path(".soak"), help="output folder")
    from tests.soak.run import run

    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
