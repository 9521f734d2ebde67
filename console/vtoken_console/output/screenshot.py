"""Takes screenshots of the real application, headless, connected to a running server.

`python -m vtoken_console.output.screenshot --url URL --out DIR [--size 120x36] [--views pool,…]`
writes an SVG for each view, and a PNG where resvg-py and a monospaced font are installed. The view
`tour` is a moving picture instead, `console-tour.webp`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from textual.pilot import Pilot

from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.dots import with_dots
from vtoken_console.export.raster import PngUnavailable, svg_to_png
from vtoken_console.look.themes import NAMES
from vtoken_console.output import animation
from vtoken_console.output.screenshot_scenarios import SCENARIOS, Scenario
from vtoken_console.widgets.heatmap.colouring import Mode

TIMEOUT_S = 30.0  # until the first data
REPLAY_S = 120  # length of the flight recording that is replayed
TOUR = "tour"
VIEWS = (*SCENARIOS, TOUR)


async def take(
    url: str,
    out: Path,
    *,
    size: tuple[int, int] | None = None,
    views: Sequence[str],
    token: str | None = None,
    settle_s: float = 3.0,
    ascii_only: bool = False,
) -> list[Path]:
    """Writes `out`/console-VIEW.svg (and .png), each at its scenario's size unless `size` is given.

    Raises TimeoutError if no data arrives.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    runs: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for name in views:
        if name == TOUR:
            continue
        scenario = SCENARIOS[name]
        runs.setdefault((scenario.source, size or scenario.size), []).append(name)
    for (source, columns_rows), names in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            if source == "replay":
                recording = await _flight(url, token, Path(folder))
                app = ConsoleApp(recording.name, recording=recording, ascii_only=ascii_only)
            else:
                guided = source == "guide"
                app = ConsoleApp(url, token=token, ascii_only=ascii_only, guided=guided)
            async with app.run_test(size=columns_rows) as pilot:
                await _first_data(app, pilot, url)
                await pilot.pause(settle_s)
                for name in names:
                    await _drive(app, pilot, SCENARIOS[name])
                    written += _save(app, out, name)
                    await _back(app, pilot, SCENARIOS[name])
    if TOUR in views:
        app = ConsoleApp(url, token=token, ascii_only=ascii_only)
        async with app.run_test(size=animation.SIZE) as pilot:
            await _first_data(app, pilot, url)
            await pilot.pause(settle_s)
            try:
                written.append(await animation.film(app, pilot, out / f"console-{TOUR}.webp"))
            except PngUnavailable as reason:
                print(f"no moving picture: {reason}", file=sys.stderr)
    return written


async def _first_data(app: ConsoleApp, pilot: Pilot[int], url: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while app.source is None or not app.source.feed.connection.is_live:
        if time.monotonic() > deadline:
            why = app.source.feed.connection.error if app.source else "not started"
            raise TimeoutError(f"no data from {url} within {TIMEOUT_S:g} s: {why}")
        await pilot.pause(0.1)


async def _flight(url: str, token: str | None, folder: Path) -> Path:
    """Downloads the server's flight recording into `folder`."""
    from vtoken.client import AsyncClient, Server

    client = AsyncClient(Server(url, token))
    try:
        content = await client.recording(REPLAY_S)
    finally:
        await client.aclose()
    path = folder / "incident.ndjson.gz"
    path.write_bytes(content)
    return path


async def _drive(app: ConsoleApp, pilot: Pilot[int], scenario: Scenario) -> None:
    app.dashboard.set_view(scenario.view)
    if scenario.appearance in NAMES:
        app.colours.set_theme(scenario.appearance, "truecolor")
    elif scenario.appearance:
        app.colours.set_mode(Mode(scenario.appearance))
    if scenario.config is not None and app.source is not None:
        await app.source.rest.patch_config(dict(scenario.config))
    target = app.dashboard.query_one(scenario.focus)
    if scenario.view in ("all", scenario.focus.removeprefix("#")):
        target.focus()
    for key in scenario.keys:
        await pilot.press(key)
        await pilot.pause(0.1)
    await pilot.pause(scenario.settle_s)


def _save(app: ConsoleApp, out: Path, name: str) -> list[Path]:
    svg = with_dots(app.export_screenshot(title=f"vtoken console: {name}"))
    path = out / f"console-{name}.svg"
    path.write_text(svg, encoding="utf-8")
    try:
        path.with_suffix(".png").write_bytes(svg_to_png(svg))
    except PngUnavailable as reason:
        print(f"{path.name}: no PNG: {reason}", file=sys.stderr)
        return [path]
    return [path, path.with_suffix(".png")]


async def _back(app: ConsoleApp, pilot: Pilot[int], scenario: Scenario) -> None:
    """Restores the dashboard to its state before the scenario."""
    while app.screen is not app.dashboard:
        await pilot.press("escape")
        await pilot.pause(0.1)
    app.dashboard.query_one("#pool").focus()
    for _ in range(3):
        app.panels.zoom_out()
    app.dashboard.set_view("all")
    if scenario.appearance in NAMES:
        app.colours.set_theme("dark", "truecolor")
    elif scenario.appearance:
        app.colours.set_mode(Mode.UTILISATION)
    if scenario.undo:
        await pilot.press("u")
        await pilot.pause(1.0)
    if "e" in scenario.keys:
        app.panels.event_kinds()
    app.dashboard.dismiss_notes()


def parse_size(text: str) -> tuple[int, int]:
    """120x36 as (120, 36)."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, like 120x36")
    return int(width), int(height)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vtoken_console.output.screenshot",
        description="Take screenshots of the console, connected to a running server.",
    )
    parser.add_argument("--url", default=os.environ.get("VTOKEN_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, metavar="WxH", help="size of every screenshot")
    parser.add_argument("--views", default=",".join(VIEWS), help=f"some of {','.join(VIEWS)}")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds to wait first")
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
