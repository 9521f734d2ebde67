"""A moving picture of the console on a live server: the real app, headless, driven through a tour.

The tour waits for the load's swing to show memory that is ample and memory that is short. In
between it switches the policy and opens the text of a request. The policy is restored at the end.
Frames are taken at a fixed rate while the app runs; equal neighbours become one longer frame.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from textual.pilot import Pilot

from vtoken import wire
from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.dots import with_dots
from vtoken_console.export.raster import PngUnavailable, svg_to_png
from vtoken_console.screens.confirm import ConfirmScreen

SIZE = (100, 30)
FRAMES_PER_S = 1.5
ZOOM = 0.72  # of Textual's SVG: 100 columns are 890 pixels, the width of a repository page
QUALITY = 60  # lossless WebP: how long the encoder searches, not how the picture looks
LONGEST_WAIT_S = 90.0  # for a scene's condition; the demo's load swings within 50 s


def _status(app: ConsoleApp) -> wire.Status | None:
    return None if app.source is None else app.source.feed.model.status


def is_ample(app: ConsoleApp) -> bool:
    """Requests run, nobody gave a token for a while, and half of the pool is free."""
    status = _status(app)
    if status is None or status.pressure is None or not status.requests.running:
        return False
    return status.pressure.recent_tokens == 0 and 2 * status.blocks.free > status.blocks.total


def is_short(app: ConsoleApp) -> bool:
    status = _status(app)
    return status is not None and status.pressure is not None and status.pressure.short_blocks > 0


def asks(app: ConsoleApp) -> bool:
    """The console asks whether a change is meant."""
    return isinstance(app.screen, ConfirmScreen)


@dataclass(frozen=True, slots=True)
class Scene:
    """Once `when` is true, within `LONGEST_WAIT_S`, `keys` are pressed, on the dashboard with
    `focus` focused; then `seconds` are filmed under `title`.
    """

    title: str
    seconds: float
    keys: tuple[str, ...] = ()
    focus: str | None = None
    when: Callable[[ConsoleApp], bool] | None = None


TOUR = (
    Scene("memory is ample: nobody loses a token", 4.0, focus="#pool", when=is_ample),
    Scene("memory is short: running requests give what is needed", 9.0, when=is_short),
    Scene("another policy, and what it would do", 2.5, ("P", *"random")),
    Scene("what cannot be undone is confirmed", 0.5, ("enter",)),
    Scene("what cannot be undone is confirmed", 1.5, ("right",), when=asks),
    Scene("switched while requests run", 3.0, ("enter",)),
    Scene("switched while requests run", 3.0, ("escape",), "#pool"),
    Scene("the text of a request: what it gave is struck through", 6.0, ("enter",), "#requests"),
    Scene("memory is ample again: new requests keep all", 5.0, ("escape",), when=is_ample),
)


async def film(app: ConsoleApp, pilot: Pilot[int], path: Path) -> Path:
    """Drive `app` through the tour and write the WebP file `path`.

    Raises PngUnavailable when Pillow or the renderer is not installed, TimeoutError when a scene
    does not come about.
    """
    try:
        from PIL import Image
    except ImportError:
        raise PngUnavailable("Pillow is not installed; pip install pillow") from None
    assert app.source is not None
    rest = app.source.rest
    before: dict[str, Any] = msgspec.to_builtins((await rest.config()).desired)
    frames: list[tuple[str, float]] = []
    try:
        for scene in TOUR:
            if scene.focus is not None and app.screen is app.dashboard:
                app.dashboard.query_one(scene.focus).focus()
            await _wait(app, pilot, scene)
            for key in scene.keys:
                await pilot.press(key)
                await _record(app, pilot, scene.title, 1 / FRAMES_PER_S, frames)
            await _record(app, pilot, scene.title, scene.seconds, frames)
    finally:
        await rest.patch_config({"policy": before["policy"]})
    images = [
        Image.open(io.BytesIO(svg_to_png(svg, zoom=ZOOM))).convert("RGB") for svg, _ in frames
    ]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[round(1000 * seconds) for _, seconds in frames],
        loop=0,
        lossless=True,
        quality=QUALITY,
        minimize_size=True,
    )
    return path


async def _wait(app: ConsoleApp, pilot: Pilot[int], scene: Scene) -> None:
    """Raises TimeoutError: a film whose title is not what it shows would mislead."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while scene.when is not None and not scene.when(app):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no moment for {scene.title!r} within {LONGEST_WAIT_S:g} s")
        await pilot.pause(0.2)


async def _record(
    app: ConsoleApp,
    pilot: Pilot[int],
    title: str,
    seconds: float,
    frames: list[tuple[str, float]],
) -> None:
    """Append SVG frames of the next `seconds`, each with the seconds that it is shown."""
    period = 1 / FRAMES_PER_S
    for _ in range(max(1, round(seconds * FRAMES_PER_S))):
        await pilot.pause(period)
        svg = with_dots(app.export_screenshot(title=title))
        if frames and frames[-1][0] == svg:
            frames[-1] = svg, frames[-1][1] + period
        else:
            frames.append((svg, period))
