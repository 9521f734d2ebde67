"""Shared by the console's tests: a prepared engine, a running app, the text on its screen."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable
from html import unescape
from typing import Any

import msgspec
from rich.cells import get_character_cell_size
from textual.css.query import QueryError
from textual.strip import Strip

from tests.support import waiting
from tests.support.core.live import LiveEngine, make_engine, make_quiet
from tests.support.serving import Served
from vtoken import wire
from vtoken.client import Server
from vtoken_console.app.app import ConsoleApp
from vtoken_console.widgets.figures.charts import Charts
from vtoken_console.widgets.lines import LinesWidget
from vtoken_console.widgets.outcome import Outcome

SVG_CHAR_WIDTH = 12.2  # of Rich's pictures
SVG_TEXT = re.compile(r'<text [^>]*?x="([\d.]+)"[^>]*-line-(\d+)\)"[^>]*>(.*?)</text>')
# Commands that change something, or preview a change.
CHANGES = ("patch_config", "compact", "undo", "confirm")


def make_busy(
    num_blocks: int = 400, num_requests: int = 6, *, prefix_tokens: int = 0, epoch: str = "e1"
) -> LiveEngine:
    """Make idle requests of some hundred tokens with holes. Compaction is possible, and enough
    blocks are free that no round runs automatically.

    With `prefix_tokens`, prompts are cached and share that many tokens.
    """
    shared = {"prefix": "system", "prefix_tokens": prefix_tokens} if prefix_tokens else {}
    core = make_quiet(num_blocks, model="demo/test-llama", epoch=epoch, prefix_caching=bool(shared))
    core.configure(
        policy={"name": "h2o", "params": {"recent_ratio": 0.5, "sinks": 4}},
        budget_tokens=256,
        evict_when="always",
        interval_tokens=64,
        theta_f=0.25,
        batch_size=32,
        headroom_blocks=8,
        low_watermark_blocks=num_blocks // 8,
        recycle=False,
    )
    for n in range(num_requests):
        core.admit(f"cmpl-{(0xA91F + 0x1357 * n) % 0x10000:04x}", 340 + 40 * n, **shared)
    core.steps(4)
    return core


def make_short(num_blocks: int = 320, concurrency: int = 60) -> LiveEngine:
    """Make a pool in which blocks are short: requests wait, and others gave tokens for them."""
    core = make_engine(
        num_blocks=num_blocks,
        config={
            "policy": {"name": "h2o", "params": {"recent_ratio": 0.5, "sinks": 4}},
            "budget_tokens": 128,
            "interval_tokens": 32,
            "headroom_blocks": 8,
        },
        concurrency=concurrency,
        prompt_tokens=180,
        max_tokens=400,
        prefix_tokens=0,
        epoch="e1",
        model="demo/test-llama",
        prefix_caching=False,
    )
    core.core.reserves = True
    for _ in range(500):
        core.steps()
        pressure = core.reporter.status().pressure
        if pressure.short_blocks and pressure.asked_blocks and pressure.given_tokens:
            return core
    raise AssertionError("no block is short")


def compact(core: LiveEngine, request_id: str) -> wire.Relocation:
    """Compact one request within the next steps; return the moves."""
    core.call("compact", request_id=request_id)
    core.steps(2)
    (event,) = core.runtime.events.page(0, 10_000, "relocation").events[-1:]
    return msgspec.convert(event.data, wire.Relocation)


def tokens_of(core: LiveEngine, request_id: str) -> list[wire.TokenRow]:
    """Every token of a request."""
    rows: list[wire.TokenRow] = core.reporter.tokens(request_id, 0, 1 << 20).rows
    return rows


def applied(served: Served) -> list[dict[str, Any]]:
    """The patches that were applied."""
    return [call.patch for call in served.calls_of("patch_config")]


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for `condition` of widgets that may not exist yet."""

    def holds() -> bool:
        with contextlib.suppress(AttributeError, LookupError, QueryError):
            return bool(condition())
        return False

    await waiting.until(holds, what)


@contextlib.asynccontextmanager
async def running(
    server: Server | str, size: tuple[int, int] = (120, 36), **options: Any
) -> AsyncIterator[Any]:
    """The real app, headless; yields (app, pilot) once the first snapshot is drawn."""
    app = ConsoleApp(server, **options)
    app.dashboard.HELD_S = 0.0  # a test may press a key twice in a row
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(lambda: app.source is not None and app.dashboard.synced, "no first snapshot")
        pool = app.dashboard.heatmap
        too_low = 5  # lines of a panel without room for a map
        await until(lambda: pool.grid is not None or 0 < pool.region.height < too_low, "no map")
        await pilot.pause()
        yield app, pilot


def screen_text(app: ConsoleApp) -> str:
    """The terminal's content as lines of text."""
    width, height = app.size
    rows = [[" "] * width for _ in range(height)]
    for x, line, text in SVG_TEXT.findall(app.export_screenshot()):
        at = round(float(x) / SVG_CHAR_WIDTH)
        for char in unescape(text).replace("\xa0", " "):
            cells = get_character_cell_size(char)
            rows[int(line)][at : at + cells] = [char, *[""] * (cells - 1)]
            at += cells
    return "\n".join(map("".join, rows))


def outcome(app: ConsoleApp) -> str:
    """What the settings page says would happen, or has happened."""
    return app.screen.query_one(Outcome).text


def drawn(panel: LinesWidget) -> list[Strip]:
    """The lines of a panel as they are drawn."""
    return [panel.render_line(y) for y in range(panel.content_size.height)]


def charts_text(app: ConsoleApp) -> str:
    """The charts as they are drawn."""
    return "\n".join(strip.text for strip in drawn(app.dashboard.query_one(Charts)))


def words_drawn(
    panel: LinesWidget, has_style: Callable[[Any], Any], *, plain: bool = True
) -> tuple[list[str], list[str]]:
    """The words of a text panel drawn in such a style: of the text, of the shadow's beside it.

    `plain`: those of one token alone.
    """
    sides: tuple[list[str], list[str]] = ([], [])
    for strip in drawn(panel)[:-1]:  # the last line explains the styles
        side = 0
        for segment in strip:
            side = max(side, "│" in segment.text)
            if has_style(segment.style):
                sides[side].extend(segment.text.split())
    return (plain_words(sides[0]), plain_words(sides[1])) if plain else sides


def plain_words(texts: Iterable[str]) -> list[str]:
    """The words of the tests' vocabulary, in order; other tokens are parts of a character."""
    return [word for text in texts for word in re.findall(r"<s>|w\d+", text)]


def messages(app: ConsoleApp) -> str:
    """The messages on the screen, oldest first."""
    return "\n".join(str(toast.render()) for toast in app.screen.query("Toast"))
