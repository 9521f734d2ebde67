"""A moving picture of the console on a live server: the real app, headless, driven through a tour.

It begins while two clients find memory ample and nothing happens. A crowd comes, and memory is
short; the tour shows who gives, the words of one that gave, and a lower floor on trial, which one
key takes back. Then the crowd leaves, and the words come back. The clients and the server are
those of `scripts.sample`. Frames are taken at a fixed rate while the app runs; equal neighbours
become one longer frame.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from textual.pilot import Pilot

from scripts.sample import ANSWER_TOKENS, CALM, CROWD, WHO, chat
from vtoken import wire
from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.dots import with_dots
from vtoken_console.export.raster import PngUnavailable, svg_to_png
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.screens.request import RequestScreen, Summary
from vtoken_console.widgets.requests import Requests

SIZE = (100, 30)
FRAMES_PER_S = 1.5
ZOOM = 0.72  # of Textual's SVG: 100 columns are 890 pixels, the width of a repository page
QUALITY = 60  # lossless WebP: how long the encoder searches, not how the picture looks
LONGEST_WAIT_S = 120.0  # for a scene's condition
Keys = tuple[str, ...]


def _status(app: ConsoleApp) -> wire.Status | None:
    return None if app.source is None else app.source.feed.model.status


def is_ample(app: ConsoleApp) -> bool:
    """All calm clients run, nobody gave a token for a while, and half of the pool is free."""
    status = _status(app)
    if status is None or status.pressure is None or status.requests.running < CALM:
        return False
    return status.pressure.recent_tokens == 0 and 2 * status.blocks.free > status.blocks.total


def somebody_waits(app: ConsoleApp) -> bool:
    """For blocks, while others give."""
    status = _status(app)
    if status is None or status.pressure is None:
        return False
    pressure = status.pressure
    return status.requests.waiting > 0 and min(pressure.short_blocks, pressure.recent_tokens) > 0


def is_busy(app: ConsoleApp) -> bool:
    """Memory is in use, and somebody gave tokens for it lately."""
    status = _status(app)
    if status is None or status.pressure is None:
        return False
    return status.pressure.recent_tokens > 0 and 5 * status.blocks.free < status.blocks.total


def on_trial(app: ConsoleApp) -> bool:
    config = None if app.source is None else app.source.feed.model.config
    return config is not None and config.trial is not None


def asked_or_on_trial(app: ConsoleApp) -> bool:
    return isinstance(app.screen, ConfirmScreen) or on_trial(app)


def yes(app: ConsoleApp) -> Keys:
    """To the question whether a change is meant, if there is one."""
    return ("right", "enter") if isinstance(app.screen, ConfirmScreen) else ()


def close(app: ConsoleApp) -> Keys:
    return () if app.screen is app.dashboard else ("escape",)


def are_back(app: ConsoleApp) -> bool:
    """All parked tokens of the request that is shown came back."""
    if not isinstance(app.screen, RequestScreen):
        return False
    detail = app.screen.query_one(Summary).detail
    return detail is not None and detail.restored_tokens > 0 and detail.parked_tokens == 0


def stays(row: wire.RequestRow) -> bool:
    """Whether a request has parked tokens, and goes on when the crowd leaves."""
    return row.parked_tokens > 0 and WHO[1] in row.id and 4 * row.output_tokens < 3 * ANSWER_TOKENS


def one_stays(app: ConsoleApp) -> bool:
    return any(map(stays, app.dashboard.query_one(Requests).rows))


def open_one_that_stays(app: ConsoleApp) -> Keys:
    """Puts the cursor on such a request; the key opens its page."""
    table = app.dashboard.query_one(Requests)
    table.action_jump(0)
    table.action_move(0, next(at for at, row in enumerate(table.rows) if stays(row)))
    return ("enter",)


def open_a_giver(app: ConsoleApp) -> Keys:
    """Puts the cursor on the request that gave most; the key opens its page."""
    table = app.dashboard.query_one(Requests)
    giver = max(range(len(table.rows)), key=lambda at: table.rows[at].dead)
    table.action_jump(0)
    table.action_move(0, giver)
    return ("enter",)


@dataclass(frozen=True, slots=True)
class Scene:
    """Once `when` is true, within `LONGEST_WAIT_S`, `keys` are pressed, on the dashboard with the
    requests focused; then `seconds` are filmed under `title`. `crowd`: whether it is there from
    now on; None: as before.
    """

    title: str
    seconds: float
    keys: Keys | Callable[[ConsoleApp], Keys] = ()
    when: Callable[[ConsoleApp], bool] | None = None
    crowd: bool | None = None


TOUR = (
    Scene("memory is ample: nobody loses a token", 5.0, when=is_ample),
    Scene("more clients come", 3.0, crowd=True),
    Scene("memory is short: some wait, running requests give", 9.0, when=somebody_waits),
    Scene("what one gave, word by word", 6.0, open_a_giver),
    Scene("a lower floor, and what it would bring", 4.0, ("escape", "f", *"0.33")),
    Scene("on trial, with a guard", 2.5, ("ctrl+t", "tab", "tab", *"20")),
    Scene("on trial, with a guard", 0.5, ("enter",)),
    Scene("on trial, with a guard", 0.5, yes, when=asked_or_on_trial),
    Scene("on trial: the engine takes it back by itself", 6.0, close, when=on_trial),
    Scene("undone by one key", 4.0, ("u",)),
    Scene("words that one gave are parked", 3.0, open_one_that_stays, when=one_stays),
    Scene("the crowd leaves", 2.0, crowd=False),
    Scene("its words come back", 4.0, when=are_back),
    Scene("memory is free again", 5.0, close),
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
    rest, hello = app.source.rest, app.source.feed.model.hello
    assert hello is not None
    before: dict[str, Any] = msgspec.to_builtins((await rest.config()).desired)
    frames: list[tuple[str, float]] = []
    clients = [client(app.session.url, hello.model, name) for name in range(CALM)]
    crowd: list[asyncio.Task[None]] = []
    try:
        for scene in TOUR:
            if scene.crowd:
                names = range(CALM, CALM + CROWD)
                crowd += [client(app.session.url, hello.model, name) for name in names]
            elif scene.crowd is False:
                for one in crowd:
                    one.cancel()
            app.clear_notifications()  # of a machine that is busy with this film
            if app.screen is app.dashboard:
                app.dashboard.query_one(Requests).focus()
            await _wait(app, pilot, scene)
            for key in scene.keys(app) if callable(scene.keys) else scene.keys:
                await pilot.press(key)
                await _record(app, pilot, scene.title, 1 / FRAMES_PER_S, frames)
            await _record(app, pilot, scene.title, scene.seconds, frames)
    finally:
        for one in (*clients, *crowd):
            one.cancel()
        await rest.patch_config({"budget_ratio": before["budget_ratio"]})
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


def client(url: str, model: str, name: int) -> asyncio.Task[None]:
    return asyncio.create_task(chat(url, model, name))


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
