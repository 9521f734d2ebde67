"""A follower of published frames has the engine's state or none: with lost frames, a late start and
several readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.core.live import LiveEngine, make_engine
from tests.support.scripted import ScriptedEngine
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.wire.frames import FrameChain, FrameSequence
from vtoken.wire.views import Change, View
from vtoken_api.fanout import telemetry
from vtoken_api.fanout.telemetry import TelemetryReader

NUM_BLOCKS = 20


def same(view: View, frame: wire.Frame) -> None:
    """Assert that `view` equals the full `frame`."""
    np.testing.assert_equal(view.blocks, Change.of(frame).blocks)
    assert view.step == frame.step
    assert view.requests == {row.id: row for row in frame.requests or ()}
    assert (view.status, view.config) == (frame.status, frame.config)


class Reader:
    """One API process and the view that it derives from the frames it receives."""

    def __init__(self) -> None:
        self.chain = FrameChain()
        self.view: View | None = None

    def take(self, payload: bytes) -> None:
        self.view = self.chain.take(payload)


@settings(max_examples=60)
@given(
    # Each step: the blocks that change, whether either reader misses the frame or restarts,
    # whether one of them subscribes (again) before it, and whether the frame has a status.
    st.lists(
        st.tuples(
            st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS),
            st.tuples(st.booleans(), st.booleans()),
            st.tuples(st.booleans(), st.booleans()),
            st.booleans(),
            st.booleans(),
        ),
        max_size=25,
    ),
    st.randoms(use_true_random=False),
)
def test_reader_shows_the_state_of_the_engine_or_none(steps: list, random: object) -> None:  # type: ignore[type-arg]
    engine = ScriptedEngine(num_blocks=NUM_BLOCKS)
    try:
        frames, readers = FrameSequence(), [Reader(), Reader()]
        complete = [False, False]  # has every frame since a full one
        told = engine.frame()  # the newest status
        for changed, lost, restarted, subscribed, figures in steps:
            engine.step(0)
            where = sorted(changed)
            for array in (engine.live, engine.flags, engine.owner):
                array[where] = [random.randint(0, 3) for _ in where]  # type: ignore[attr-defined]
            now = engine.frame()
            if figures or subscribed:
                told = now
            shown = replace(now, status=told.status, requests=told.requests, config=told.config)
            if now is not told:
                now = replace(now, status=None, requests=None, config=None)
            sent = frames.next(now, whole=subscribed)
            whole = sent.block_ids is None and sent.status is not None
            assert whole or not subscribed
            payload = msgspec.msgpack.encode(sent)
            for i in range(2):
                if restarted[i]:
                    readers[i], complete[i] = Reader(), False
                if lost[i]:
                    complete[i] = False
                    continue
                complete[i] = complete[i] or whole
                readers[i].take(payload)
                view = readers[i].view
                assert (view is not None) == complete[i]
                if view is not None:
                    same(view, shown)
    finally:
        engine.close()


def test_views_that_clients_hold_are_not_written() -> None:
    engine = ScriptedEngine(num_blocks=NUM_BLOCKS)
    try:
        frames, reader, seen = FrameSequence(), Reader(), []
        for _ in range(4):
            frame = engine.frame()
            reader.take(msgspec.msgpack.encode(frames.next(frame, whole=False)))
            assert reader.view is not None
            seen.append((reader.view, frame))
            engine.step(2)
    finally:
        engine.close()
    for view, frame in seen:
        same(view, frame)


def test_little_change_makes_a_small_frame_and_much_a_whole_one() -> None:
    engine = ScriptedEngine(num_blocks=10_000)
    try:
        frames = FrameSequence()
        frames.next(engine.frame(), whole=False)
        engine.step(5)
        small = frames.next(engine.frame(), whole=False)
        assert small.block_ids is not None
        assert len(msgspec.msgpack.encode(small)) < 6_000
        engine.live[:] += 1
        assert frames.next(engine.frame(), whole=False).block_ids is None
    finally:
        engine.close()


@contextlib.asynccontextmanager
async def following(core: LiveEngine) -> AsyncIterator[list[View | None]]:
    """The views that an API process derives from the published frames, over a real socket."""
    views: list[View | None] = []
    chain = FrameChain()

    def on_frame(payload: bytes) -> bool:
        views.append(chain.take(payload))
        return views[-1] is not None

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


async def until_shown(core: LiveEngine, *readers: list[View | None]) -> None:
    """Step until every reader has the step that the engine has just published."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            core.steps()
            await asyncio.sleep(0.01)
            newest = [views[-1] if views else None for views in readers]
            if all(v is not None and v.step == core.runtime.step for v in newest):
                for view in newest:
                    assert view is not None
                    np.testing.assert_array_equal(view.blocks["live"], core.reporter.live())
                    np.testing.assert_array_equal(view.blocks["flags"], core.reporter.flags())
                    np.testing.assert_array_equal(view.blocks["owner"], core.reporter.owner())
                return


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveEngine]:
    monkeypatch.setattr(telemetry, "RESYNC_S", 0.0)
    engine = make_engine(max_hz=1000.0)
    engine.steps(30)
    assert engine.runtime.counters.pressure.given_tokens > 0
    yield engine
    engine.close()


async def test_reader_that_lost_frames_gets_a_whole_one(core: LiveEngine) -> None:
    async with following(core) as views:
        await until_shown(core, views)
        core.steps()
        core.publisher._frames.next(core.controller.frame(), whole=False)  # reaches nobody
        shown = len(views)
        await until_shown(core, views)
        assert None in views[shown:]  # it noticed


async def test_one_process_that_starts_late_or_again_disturbs_no_other(core: LiveEngine) -> None:
    async with following(core) as first:
        await until_shown(core, first)
        for _ in range(2):
            async with following(core) as second:
                await until_shown(core, first, second)
        await until_shown(core, first)
        assert None not in first
