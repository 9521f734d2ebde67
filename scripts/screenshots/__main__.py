"""`python -m scripts.screenshots [--out DIR] [--views pool,…] [--url URL]`.

Without `--url` it starts the demo's server and traffic, and uses every control once, so that the
charts and the log have contents. The moving picture has a calm server of its own, the fleet page
one with several engines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import sample
from scripts.screenshots.fleet import fleet_server
from scripts.screenshots.scenarios import SCENARIOS
from scripts.screenshots.take import TOUR, VIEWS, take
from vtoken.demo import run as demo
from vtoken.demo.exercise import exercise
from vtoken.demo.server import DemoError

WARM_UP_S, EXERCISE_S = 10.0, 30.0


@contextmanager
def demo_server() -> Iterator[str]:
    """The URL of the demo's server, with traffic on it, after every control was used."""
    with tempfile.TemporaryDirectory(prefix="vtoken-screenshots-") as folder:
        options = demo.parse(["--headless", "--out", folder])
        server = demo.make_server(options)
        with server, demo.traffic(server, options, drain_s=0.0):
            time.sleep(WARM_UP_S)  # traffic alone
            with demo.first_engine(server) as client:
                exercise(client, time.monotonic() + EXERCISE_S, print)
            yield server.url


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.screenshots", description=__doc__)
    parser.add_argument("--url", help="a running server (default: start the demo's)")
    parser.add_argument("--out", type=Path, default=Path("screenshots"), help="(screenshots)")
    parser.add_argument("--views", default=",".join(VIEWS), help=f"some of {','.join(VIEWS)}")
    args = parser.parse_args(argv)
    views = [view for view in args.views.split(",") if view]
    if unknown := [view for view in views if view not in VIEWS]:
        parser.error(f"unknown views {', '.join(unknown)}; known: {', '.join(VIEWS)}")
    token = os.environ.get("VTOKEN_TOKEN")
    try:
        if args.url is not None:
            written = asyncio.run(take(args.url, args.out, views=views, token=token))
        else:
            of_fleet = [v for v in views if v in SCENARIOS and SCENARIOS[v].source == "fleet"]
            others = [view for view in views if view not in (*of_fleet, TOUR)]
            written = []
            if others:
                with demo_server() as url:
                    written += asyncio.run(take(url, args.out, views=others))
            if TOUR in views:
                with sample.serving("--vtoken-show-text") as url:
                    written += asyncio.run(take(url, args.out, views=[TOUR]))
            if of_fleet:
                with fleet_server() as (url, silence):
                    written += asyncio.run(take(url, args.out, views=of_fleet, silence=silence))
    except (DemoError, TimeoutError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
