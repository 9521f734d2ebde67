"""Pictures of a live console without a terminal: the real app, headless, on a real server.

`python -m vtoken_console.screenshot --url URL --out DIR [--size 120x36] [--views pool,request]`
writes an SVG for each view, and a PNG where resvg-py and a monospaced font are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from textual.pilot import Pilot

from vtoken_console.app import ConsoleApp
from vtoken_console.raster import PngUnavailable, svg_to_png
from vtoken_console.widgets.events import Events
from vtoken_console.widgets.requests import Requests

# View -> keys pressed on the dashboard with all panels; every view starts from there anew.
VIEWS: dict[str, tuple[str, ...]] = {
    "pool": (),
    "blocks": ("z",),
    "slots": ("z", "z"),
    "request": ("enter",),
    "control": ("t", "left", "left", "left", "left", "left"),
    "policy": ("P",),
    "events": ("e",),
    "help": ("question_mark",),
    "palette": ("colon",),
}
TIMEOUT_S = 30.0  # for the first data
DEFAULT_VIEWS = "pool,blocks,slots,request,control,help"
FOCUS = {"request": Requests, "events": Events}


async def take(
    url: str,
    out: Path,
    *,
    size: tuple[int, int],
    views: Sequence[str],
    token: str | None = None,
    settle_s: float = 3.0,
    ascii_only: bool = False,
) -> list[Path]:
    """Writes `out`/console-VIEW.svg (and .png); raises TimeoutError when no data comes."""
    app = ConsoleApp(url, token=token, ascii_only=ascii_only)
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    async with app.run_test(size=size) as pilot:
        deadline = time.monotonic() + TIMEOUT_S
        while app.client is None or not app.client.connection.is_live:
            if time.monotonic() > deadline:
                why = app.client.connection.error if app.client else "not started"
                raise TimeoutError(f"no data from {url} within {TIMEOUT_S:g} s: {why}")
            await pilot.pause(0.1)
        await pilot.pause(settle_s)
        for view in views:
            await _drive(app, pilot, view)
            svg = app.export_screenshot(title=f"vtoken console: {view}")
            path = out / f"console-{view}.svg"
            path.write_text(svg, encoding="utf-8")
            written.append(path)
            try:
                path.with_suffix(".png").write_bytes(svg_to_png(svg))
                written.append(path.with_suffix(".png"))
            except PngUnavailable as reason:
                print(f"{path.name}: no PNG: {reason}", file=sys.stderr)
            while app.screen is not app.dashboard:
                await pilot.press("escape")
                await pilot.pause(0.1)
            app.action_zoom_out()
    return written


async def _drive(app: ConsoleApp, pilot: Pilot[int], view: str) -> None:
    focus = FOCUS.get(view)
    if focus is not None:
        app.dashboard.query_one(focus).focus()
    else:
        app.dashboard.query_one("#pool").focus()
    for key in VIEWS[view]:
        await pilot.press(key)
        await pilot.pause(0.1)
    await pilot.pause(1.2)


def parse_size(text: str) -> tuple[int, int]:
    """120x36 as (120, 36)."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, like 120x36")
    return int(width), int(height)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vtoken_console.screenshot",
        description="Write pictures of the console, connected to a running server.",
    )
    parser.add_argument("--url", default=os.environ.get("VTOKEN_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=(120, 36), metavar="WxH")
    parser.add_argument("--views", default=DEFAULT_VIEWS, help=f"of {','.join(VIEWS)}")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds to watch first")
    parser.add_argument("--ascii", action="store_true")
    args = parser.parse_args(argv)
    views = [v for v in args.views.split(",") if v]
    unknown = [v for v in views if v not in VIEWS]
    if unknown:
        parser.error(f"unknown views {', '.join(unknown)}; known: {', '.join(VIEWS)}")
    try:
        written = asyncio.run(
            take(
                args.url,
                args.out,
                size=args.size,
                views=views,
                settle_s=args.settle,
                token=os.environ.get("VTOKEN_TOKEN"),
                ascii_only=args.ascii,
            )
        )
    except TimeoutError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
