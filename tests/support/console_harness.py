"""What the console's tests share: waiting, a running app, the text on its screen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from textual.css.query import QueryError

from tests.support import waiting
from vtoken_console.app.app import ConsoleApp


async def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for `condition`, of widgets that may not be there yet."""

    def holds() -> bool:
        with contextlib.suppress(AttributeError, LookupError, QueryError):
            return bool(condition())
        return False

    await waiting.until(holds, what)


@contextlib.asynccontextmanager
async def running(
    url: str, size: tuple[int, int] = (120, 36), **options: Any
) -> AsyncIterator[Any]:
    """The real app, headless; yields (app, pilot) once the first snapshot is drawn."""
    app = ConsoleApp(url, **options)
    app.controls.HELD_S = 0.0  # a test may press a key twice in a row
    async with app.run_test(size=size) as pilot:
        await until(lambda: app.source is not None and app.dashboard.synced, "no first snapshot")
        pool = app.dashboard.heatmap
        too_low = 5  # lines of a panel without room for a map
        await until(lambda: pool.grid is not None or 0 < pool.region.height < too_low, "no map")
        await pilot.pause()
        yield app, pilot


def screen_text(app: ConsoleApp) -> str:
    """What the terminal shows, as lines of text."""
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in lines)
