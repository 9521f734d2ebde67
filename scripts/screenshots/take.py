"""Takes screenshots of the real application, headless, connected to a running server.

Each view is an SVG, and a PNG where resvg-py and a monospaced font are installed. The view `tour`
is a moving picture instead, `console-tour.webp`.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from PIL import Image
from textual.pilot import Pilot

from scripts.screenshots import tour
from scripts.screenshots.fleet import Silence
from scripts.screenshots.scenarios import SCENARIOS, Scenario
from vtoken.client import AsyncClient, Server
from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.dots import with_dots
from vtoken_console.export.raster import PngUnavailable, svg_to_png
from vtoken_console.style.themes import NAMES
from vtoken_console.widgets.heatmap.colouring import Mode

TIMEOUT_S = 60.0  # until the first data, and until memory is short: the load swings
SILENT_S = 12.0
REPLAY_S = 120  # length of the flight recording that is replayed
TOUR = "tour"
VIEWS = (*SCENARIOS, TOUR)


async def take(
    url: str,
    out: Path,
    *,
    views: Sequence[str] = VIEWS,
    token: str | None = None,
    settle_s: float = 3.0,
    silence: Silence = nullcontext,
    when: Callable[[ConsoleApp], bool] = tour.is_busy,
) -> list[Path]:
    """Writes `out`/console-VIEW.svg (and .png) for each view.

    `silence`: stops an engine while the fleet page is taken. `when`: a view of a live server is
    taken. Raises TimeoutError if no data arrives, or that moment does not come.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    runs: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for name in views:
        if name == TOUR:
            continue
        scenario = SCENARIOS[name]
        runs.setdefault((scenario.source, scenario.size), []).append(name)
    for (source, columns_rows), names in runs.items():
        if source == "fleet":
            app = ConsoleApp(Server(url, token))
            async with app.run_test(size=columns_rows, notifications=True) as pilot:
                await _until(app, pilot, url, lambda app: app.is_ready and app.fleet.is_shown)
                await pilot.pause(settle_s)
                with silence():
                    await pilot.pause(SILENT_S)
                    for name in names:
                        written += _save(app, out, name)
                await pilot.pause(settle_s)
            continue
        with tempfile.TemporaryDirectory() as folder:
            if source == "replay":
                recording = await _flight(url, token, Path(folder))
                app = ConsoleApp(recording.name, recording=recording)
            else:
                guided = source == "guide"
                app = ConsoleApp(Server(url, token), guided=guided)
            async with app.run_test(size=columns_rows, notifications=True) as pilot:
                await _first_data(app, pilot, url)
                await pilot.pause(settle_s)
                for name in names:
                    if source != "replay":
                        await _until(app, pilot, url, when)
                    await _drive(app, pilot, SCENARIOS[name])
                    if SCENARIOS[name].undo:
                        await _until(app, pilot, url, tour.asked_or_on_trial)
                        await pilot.press(*tour.yes(app))
                        await _until(app, pilot, url, tour.on_trial)
                        await pilot.pause(SCENARIOS[name].settle_s)
                    written += _save(app, out, name)
                    await _back(app, pilot, SCENARIOS[name])
    if TOUR in views:
        app = ConsoleApp(Server(url, token))
        async with app.run_test(size=tour.SIZE, notifications=True) as pilot:
            await _first_data(app, pilot, url)
            await pilot.pause(settle_s)
            try:
                written.append(await tour.film(app, pilot, out / f"console-{TOUR}.webp"))
            except PngUnavailable as reason:
                print(f"no moving picture: {reason}", file=sys.stderr)
    return written


def is_live(app: ConsoleApp) -> bool:
    return app.source is not None and app.source.feed.connection.is_live


async def _first_data(app: ConsoleApp, pilot: Pilot[int], url: str) -> None:
    await _until(app, pilot, url, is_live)


async def _until(
    app: ConsoleApp, pilot: Pilot[int], url: str, condition: Callable[[ConsoleApp], bool]
) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(app):
        if time.monotonic() > deadline:
            why = app.source.feed.connection.error if app.source else "not started"
            raise TimeoutError(f"no data from {url} within {TIMEOUT_S:g} s: {why}")
        await pilot.pause(0.1)


async def _flight(url: str, token: str | None, folder: Path) -> Path:
    """Downloads the server's flight recording into `folder`."""
    client = AsyncClient(Server(url, token))
    try:
        content = await client.recording(REPLAY_S)
    finally:
        await client.aclose()
    path = folder / "incident.ndjson.gz"
    path.write_bytes(content)
    return path


async def _drive(app: ConsoleApp, pilot: Pilot[int], scenario: Scenario) -> None:
    app.dashboard.show_panel(scenario.view)
    if scenario.appearance in NAMES:
        app.set_theme(scenario.appearance, "truecolor")
    elif scenario.appearance:
        app.dashboard.set_mode(Mode(scenario.appearance))
    target = app.dashboard.query_one(scenario.focus)
    if scenario.view in ("", scenario.focus.removeprefix("#")):
        target.focus()
    if scenario.giver:
        tour.open_a_giver(app)
    for key in scenario.keys:
        await pilot.press(key)
        await pilot.pause(0.1)
    await pilot.pause(scenario.settle_s)


def _save(app: ConsoleApp, out: Path, name: str) -> list[Path]:
    svg = with_dots(app.export_screenshot(title=f"vtoken console: {name}"))
    path = out / f"console-{name}.svg"
    path.write_text(svg, encoding="utf-8")
    try:
        png = Image.open(io.BytesIO(svg_to_png(svg))).convert("RGB")
    except PngUnavailable as reason:
        print(f"{path.name}: no PNG: {reason}", file=sys.stderr)
        return [path]
    palette = png.quantize(256, dither=Image.Dither.NONE)  # a third of the bytes
    palette.save(path.with_suffix(".png"), optimize=True)
    return [path, path.with_suffix(".png")]


async def _back(app: ConsoleApp, pilot: Pilot[int], scenario: Scenario) -> None:
    """Restores the dashboard to its state before the scenario."""
    while app.screen is not app.dashboard:
        await pilot.press("escape")
        await pilot.pause(0.1)
    while app.dashboard.heatmap.zoom_out():
        pass
    app.dashboard.show_panel("")
    if scenario.appearance in NAMES:
        app.set_theme("dark", "truecolor")
    elif scenario.appearance:
        app.dashboard.set_mode(Mode.UTILISATION)
    if scenario.undo:
        await pilot.press("u")
        await pilot.pause(1.0)
    app.clear_notifications()
