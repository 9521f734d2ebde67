"""A follower of published frames shows the engine's state after a late start and lost frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from tests.support.core.live import LiveEngine, make_engine
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.wire.views import Change, View
from vtoken_api.fanout.telemetry import TelemetryReader


@contextlib.asynccontextmanager
async def following(core: LiveEngine) -> AsyncIterator[list[View]]:
    """The views that an API process derives from the published frames, over a real socket."""
    views = [View()]

    def on_frame(frame: wire.Frame) -> None:
        views.append(views[-1].after(Change.of(frame)))

    async def on_events(_: list[wire.Event]) -> None:
        pass

    reader = TelemetryReader(core.publisher.endpoint, on_frame, on_events)
    reader.want_state(True)
    task = asyncio.create_task(reader.run())
    try:
        yield views
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_shown(core: LiveEngine, *readers: list[View]) -> None:
    """Step until every reader has what the engine has just published, and a status since now."""
    now = core.runtime.step

    def is_shown(view: View) -> bool:
        return (
            view.step == core.runtime.step and view.status is not None and view.status.step >= now
        )

    async with asyncio.timeout(LIMIT_S):
        while not all(is_shown(views[-1]) for views in readers):
            core.steps()
            await asyncio.sleep(0.01)
    for views in readers:
        view = views[-1]
        np.testing.assert_array_equal(view.blocks["live"], core.reporter.live())
        np.testing.assert_array_equal(view.blocks["flags"], core.reporter.flags())
        np.testing.assert_array_equal(view.blocks["owner"], core.reporter.owner())
        assert {row.id for row in core.reporter.rows() if row.number} <= view.requests.keys()


@pytest.fixture
def core() -> Iterator[LiveEngine]:
    engine = make_engine(max_hz=1000.0)
    engine.steps(30)
    yield engine
    engine.close()


async def test_readers_that_start_late_or_lose_frames_show_the_state_of_the_engine(
    core: LiveEngine,
) -> None:
    async with following(core) as first:
        await until_shown(core, first)
        for _ in range(2):
            async with following(core) as second:
                await until_shown(core, first, second)
        core.steps(60)  # more than are kept for a reader that does not read
        await until_shown(core, first)
