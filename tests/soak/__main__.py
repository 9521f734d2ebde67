"""The soak, `python -m tests.soak`: real engines under random traffic, all checks on."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> int:
    """Exit code 0 when nothing was violated, failed, lost or answered wrongly; else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long in all (20)")
    parser.add_argument("--phase-seconds", type=float, default=75.0, help="a phase (75)")
    parser.add_argument("--seed", type=int, default=0, help="all that is random follows from it")
    parser.add_argument("--only", metavar="TEXT", help="engines whose name contains TEXT")
    parser.add_argument("--steps", type=int, metavar="N", help="repeat one phase for N rounds")
    parser.add_argument("--no-server", action="store_true", help="leave the HTTP phase out")
    parser.add_argument("--logs", type=Path, default=Path(".soak"), help="logs and the summary")
    from tests.soak.run import run

    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
