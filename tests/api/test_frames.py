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
from vtoken.wire.engine_state import Difference, EngineState
from vtoken_api.fanout.telemetry import TelemetryReader


@contextlib.asynccontextmanager
async def following(core: LiveEngine) -> AsyncIterator[list[EngineState]]:
    """The states that an API process derives from the published frames, over a real socket."""
    states = [EngineState()]

    def on_frame(frame: wire.Frame) -> None:
        states.append(states[-1].after(Difference.of(frame)))

    async def on_events(_: list[wire.Event]) -> None:
        pass

    reader = TelemetryReader(core.publisher.endpoint, on_frame, on_events)
    reader.want_state(True)
    task = asyncio.create_task(reader.run())
    try:
        yield states
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_shown(core: LiveEngine, *readers: list[EngineState]) -> None:
    """Step until every reader has what the engine has just published, and a status since now."""
    now = core.runtime.step

    def is_shown(state: EngineState) -> bool:
        return (
            state.step == core.runtime.step
            and state.status is not None
            and state.status.step >= now
        )

    async with asyncio.timeout(LIMIT_S):
        while not all(is_shown(states[-1]) for states in readers):
            core.steps()
            await asyncio.sleep(0.01)
    for states in readers:
        state = states[-1]
        np.testing.assert_array_equal(state.blocks["live"], core.reporter.live())
        np.testing.assert_array_equal(state.blocks["flags"], core.reporter.flags())
        np.testing.assert_array_equal(state.blocks["owner"], core.reporter.owner())
        assert {row.id for row in core.reporter.rows() if row.number} <= state.requests.keys()


@pytest.fixture
def core() -> Iterator[LiveEngine]:
    with make_engine(max_hz=1000.0) as engine:
        engine.steps(30)
        yield engine


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
