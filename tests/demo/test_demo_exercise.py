"""The exercise on the real core and API: a correct server passes, wrong answers are detected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.support.core.live import LiveEngine, Words, make_engine
from tests.support.serving import serve
from vtoken import wire
from vtoken.client import Client
from vtoken.demo.exercise import Row, exercise
from vtoken.wire import commands

pytestmark = pytest.mark.slow  # every control, one after another

Handle = Callable[[commands.Command], wire.Reply]


@asynccontextmanager
async def stepping(core: LiveEngine) -> AsyncIterator[None]:
    """Run steps in the background of requests that give tokens for each other."""
    core.runtime.ranking.vocabulary = Words()
    core.steps(30)
    assert core.runtime.counters.pressure.given_tokens > 0
    async with core.stepping():
        yield
    core.close()


def work(url: str) -> list[Row]:
    rows: list[Row] = []
    with Client(url, timeout_s=30.0) as client:
        exercise(client, time.monotonic(), rows.append)
    return rows


async def exercised(core: LiveEngine, handle: Handle) -> dict[str, Row]:
    async with stepping(core), serve(handle) as served:
        rows = await asyncio.to_thread(work, served.url)
    return {row.control: row for row in rows}


async def test_every_control_of_a_sound_server_passes() -> None:
    core = make_engine(max_hz=1000.0)
    rows = await exercised(core, core.handle)
    assert {name: row.outcome for name, row in rows.items() if not row.ok} == {}
    assert {
        "policy h2o",
        "reclamation paused",
        "compact",
        "undo",
        "a refused change",
    } <= rows.keys()
    assert rows["recycle off"].outcome == "recycle on → off"


async def test_a_server_that_answers_without_changing_is_found_out() -> None:
    core = make_engine(max_hz=1000.0)

    def lie(command: commands.Command) -> wire.Reply:
        reply = core.handle(command)
        call = command.call
        changes = isinstance(call, commands.PatchConfig) and "recycle" in call.patch
        if changes and reply.problem is None:
            reply.value = msgspec.structs.replace(
                msgspec.convert(reply.value, wire.PatchResult), applied_at_step=None
            )
        return reply

    rows = await exercised(core, lie)
    assert not rows["recycle off"].ok
    assert rows["recycle off"].outcome == "the answer has no step"
    assert rows["reclamation paused"].ok
