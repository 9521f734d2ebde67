"""The link: legal moves only, waits that grow, and a client that always comes back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette

from tests.support.console_harness import screen_text, until
from tests.support.fake_console.fake_server import FakeServer
from vtoken_console.app.app import ConsoleApp
from vtoken_console.feed.connection import (
    TRANSITIONS,
    Connection,
    IllegalTransition,
    State,
)
from vtoken_console.feed.live import LiveSource


@pytest.mark.parametrize("start", list(State))
@pytest.mark.parametrize("end", list(State))
def test_only_moves_of_the_table_are_legal(start: State, end: State) -> None:
    connection = Connection(state=start)
    if end in TRANSITIONS[start]:
        assert connection.to(end, 1.0).state is end
    else:
        with pytest.raises(IllegalTransition, match=f"found {end.value}"):
            connection.to(end, 1.0)


def test_since_counts_from_the_loss_across_all_tries() -> None:
    c = Connection().to(State.CONNECTING, 1).to(State.SYNCING, 2).to(State.LIVE, 3)
    c = c.to(State.LOST, 10, error="gone", next_try=11).to(State.CONNECTING, 11)
    c = c.to(State.LOST, 12, error="gone", next_try=13)
    assert (c.since, c.failures, c.error, c.next_try) == (10, 2, "gone", 13)
    c = c.to(State.CONNECTING, 13).to(State.SYNCING, 14).to(State.LIVE, 15)
    assert (c.since, c.failures, c.error) == (15, 0, "")


@contextlib.asynccontextmanager
async def reading(url: str, token: str | None = None) -> AsyncIterator[LiveSource]:
    client = LiveSource(url, token, 20)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_client_follows_the_server(server: FakeServer) -> None:
    async with reading(server.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        server.frozen = True
        want = server.pool.live
        await until(lambda: (client.feed.model.live == want).all(), "blocks differ")
        assert set(client.feed.model.requests) == set(server.pool.requests)
        await until(lambda: client.feed.model.events[0].seq == 1, "no history of events")
        seqs = [e.seq for e in client.feed.model.events]
        assert seqs == list(range(1, seqs[-1] + 1))


async def test_gap_in_seq_leads_to_a_fresh_snapshot(server: FakeServer) -> None:
    async with reading(server.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        before = client.feed.connection.since
        server.skip_seq = 5
        await until(
            lambda: client.feed.connection.since > before and client.feed.connection.is_live, "?"
        )
        server.frozen = True
        await until(lambda: (client.feed.model.live == server.pool.live).all(), "blocks differ")


async def test_client_returns_when_the_server_returns_with_a_new_epoch() -> None:
    first = FakeServer(num_blocks=100, num_requests=2, epoch="one")
    await first.start()
    async with reading(first.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        await first.stop()
        await until(lambda: client.feed.connection.state is State.LOST, "loss not seen")
        assert client.feed.connection.next_try is not None
        assert client.feed.model.num_blocks == 100  # the last picture is kept
        second = FakeServer(num_blocks=120, num_requests=3, epoch="two", port=first.port)
        await second.start()
        client.retry_now()
        await until(lambda: client.feed.connection.is_live, "did not come back")
        assert client.feed.model.epoch == "two"
        assert client.feed.model.num_blocks == 120
        await second.stop()


async def test_refused_token_is_said_and_tried_again() -> None:
    fake = FakeServer(num_blocks=50, num_requests=1, token="secret")
    await fake.start()
    async with reading(fake.url, "wrong") as client:
        await until(lambda: client.feed.connection.state is State.REFUSED, "not refused")
        assert "VTOKEN_TOKEN" in client.feed.connection.error
    async with reading(fake.url, "secret") as client:
        await until(lambda: client.feed.connection.is_live, "right token refused")
    await fake.stop()


async def test_flood_of_messages_leaves_the_event_loop_running(server: FakeServer) -> None:
    async with reading(server.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        server.event_storm = 2000
        before = client.feed.model.seq
        turns = 0
        while client.feed.model.seq < before + 6000:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 6000 / 64


async def test_cancelled_client_is_closed(server: FakeServer) -> None:
    async with reading(server.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
    assert client.feed.connection.state is State.CLOSED


async def test_server_without_vtoken_is_named_as_such() -> None:
    other = uvicorn.Server(uvicorn.Config(Starlette(), port=0, log_level="error", lifespan="off"))
    other.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(other.serve(sockets=[listener]))
    try:
        await until(lambda: other.started, "not started")
        app = ConsoleApp(f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with app.run_test(size=(80, 24)):
            told = "vToken is not on there"
            await until(lambda: told in " ".join(screen_text(app).split()), "not named")
            await until(lambda: "vtoken serve MODEL" in screen_text(app), "no way out")
            assert "VTOKEN_TOKEN" not in screen_text(app)
    finally:
        other.should_exit = True
        await task
        listener.close()
