"""Charts are full at the first paint: the server keeps what they need of the last minutes."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.console_harness import running, until
from tests.support.core.live import LiveEngine
from tests.support.served_core import several
from tests.support.serving import Served
from vtoken import wire
from vtoken.client import Client, Server
from vtoken_console.feed.live import HISTORY_EVENTS
from vtoken_console.feed.samples import NAMES
from vtoken_console.feed.series import Series
from vtoken_console.widgets.figures.charts import Charts, marker_line

NUM_POINTS, SPAN_S = 290, 300


def remember(core: LiveEngine, *, free: int = 7) -> float:
    """Give the engine a history, as if it had been watched for NUM_POINTS seconds."""
    now = wire.Point.of(core.reporter.status())
    history = core.controller.history
    history.clear()
    for age in range(NUM_POINTS, 0, -1):
        history.append(msgspec.structs.replace(now, ts=now.ts - age, free_blocks=free))
    return now.ts


async def test_charts_show_what_was_before_the_console(core: LiveEngine, served: Served) -> None:
    now = remember(core)
    async with running(served.url) as (app, _):
        series = app.source.feed.data.series
        assert series.span() == SPAN_S
        row = series.window(SPAN_S, 30).row("free_blocks")
        assert np.count_nonzero(row == 7) >= 28
        assert series.last_ts >= now - 1.0


async def test_moves_do_not_displace_changes_from_the_charts(
    core: LiveEngine, served: Served
) -> None:
    for theta_f in (0.3, 0.4, 0.5):
        core.call("patch_config", patch={"theta_f": theta_f}, actor="ana")
    for _ in range(HISTORY_EVENTS + 1):
        core.runtime.events.add(1, "relocation", "moved", {"request_id": "a", "moved_tokens": 1})
    async with running(served.url) as (app, _):
        feed = app.source.feed
        await until(lambda: len(feed.model.events) > HISTORY_EVENTS, "no log")
        assert [marker.revision for marker in feed.data.series.markers] == [2, 3, 4]
        view = replace(app.dashboard.query_one(Charts).view, series=Series(NAMES))
        line = "".join(text for text, _ in marker_line(view, None, 80))
        assert line == " no configuration change since this console connected"


async def test_a_lost_connection_leaves_no_gap_and_no_point_twice(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, _):
        series = app.source.feed.data.series
        known = series.last_ts
        later = msgspec.structs.replace(
            wire.Point.of(core.reporter.status()), ts=known + 30, free_blocks=3
        )
        core.controller.history.append(later)
        app.source.feed.data.apply(
            wire.Snapshot(
                epoch="e1",
                seq=app.source.feed.model.seq + 1,
                step=0,
                ts=known,
                status=None,
                config=app.source.feed.model.config,
                live=None,
                flags=None,
                requests=None,
                history=[msgspec.structs.replace(later, ts=known - 5), later],
            )
        )
        assert series.last_ts == known + 30
        row = series.window(30, 30).row("free_blocks")
        assert row[-1] == 3


async def test_each_engine_has_a_history_of_its_own() -> None:
    async with several(2) as (served, cores):
        remember(cores[0], free=5)
        remember(cores[1], free=9)
        async with running(Server(served.url, engine=0)) as (app, pilot):

            def shown(free: int) -> bool:
                row = app.source.feed.data.series.window(SPAN_S, 30).row("free_blocks")
                return bool(np.count_nonzero(row == free) >= 28)

            await until(lambda: shown(5), "engine 0's history is not shown")
            await until(lambda: app.fleet.settled, "the engines are not known")
            await pilot.press("right_square_bracket")
            await until(lambda: shown(9), "engine 1's history is not shown")


@pytest.mark.usefixtures("stepping")
async def test_the_engine_adds_a_point_a_second(core: LiveEngine, served: Served) -> None:
    history = core.controller.history
    await until(lambda: len(history) >= 3, "no history")
    gaps = np.diff([point.ts for point in history])
    assert (gaps >= 0.95).all()


async def test_a_flight_recording_holds_no_history(core: LiveEngine, served: Served) -> None:
    remember(core)
    await until(lambda: served.engine.flight.recording, "not recording")

    def download() -> bytes:
        with Client(served.url) as client:
            return client.recording(60)

    text = gzip.decompress(await asyncio.to_thread(download)).decode()
    assert '"type":"snapshot"' in text
    assert '"history":[]' in text
