"""The connection: how long it is lost, growing backoff, reconnects."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette

from tests.support.console_harness import messages, running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.routes import CONTROL, token_files
from tests.support.serving import Served, serve
from vtoken.client import Server
from vtoken_console.app.app import ConsoleApp
from vtoken_console.feed.connection import Connection, State
from vtoken_console.feed.live import LiveSource


def test_since_counts_from_the_loss_across_all_tries() -> None:
    c = Connection().to(State.CONNECTING, 1).to(State.SYNCING, 2).to(State.LIVE, 3)
    c = c.to(State.LOST, 10, error="gone", next_try=11).to(State.CONNECTING, 11)
    c = c.to(State.LOST, 12, error="gone", next_try=13)
    assert (c.since, c.failures, c.error, c.next_try) == (10, 2, "gone", 13)
    c = c.to(State.CONNECTING, 13).to(State.SYNCING, 14).to(State.LIVE, 15)
    assert (c.since, c.failures, c.error) == (15, 0, "")


@contextlib.asynccontextmanager
async def reading(url: str, token: str | None = None) -> AsyncIterator[LiveSource]:
    client = LiveSource(Server(url, token), 20)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_client_follows_the_server(core: LiveEngine, served: Served) -> None:
    async with reading(served.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        async with core.stepping():
            await until(lambda: core.runtime.step > 20, "no steps")
        core.publish()
        want = core.reporter.live()
        await until(lambda: (client.feed.model.live == want).all(), "blocks differ")
        assert set(client.feed.model.requests) == set(core.store.tables)
        await until(lambda: client.feed.model.events[0].seq == 1, "no history of events")
        seqs = [e.seq for e in client.feed.model.events]
        assert seqs == list(range(1, seqs[-1] + 1))


async def test_gap_in_seq_leads_to_a_fresh_snapshot(core: LiveEngine, served: Served) -> None:
    async with reading(served.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        before = client.feed.connection.since
        (session,) = (s for s in served.engine.hub._listeners if s.is_client)
        session._seq += 5
        core.steps(2)
        link = lambda: client.feed.connection  # noqa: E731
        await until(lambda: link().since > before and link().is_live, "?")
        await until(lambda: (client.feed.model.live == core.reporter.live()).all(), "blocks differ")


async def test_refused_token_is_reported_and_retried(core: LiveEngine, tmp_path: Path) -> None:
    files = token_files(tmp_path, read=False, control=True)
    async with serve(core.handle, **files) as served:
        async with reading(served.url, "wrong-token-0123456789") as client:
            await until(lambda: client.feed.connection.state is State.REFUSED, "not refused")
            assert "does not accept the token" in client.feed.connection.error
        async with reading(served.url, CONTROL) as client:
            await until(lambda: client.feed.connection.is_live, "right token refused")


async def test_a_token_that_the_server_did_not_check_is_told_once(served: Served) -> None:
    said = "The server has no tokens; it did not check yours."
    async with running(Server(served.url, "any")) as (app, pilot):
        await until(lambda: said in messages(app), "not told")
        await pilot.press("escape")
        await until(lambda: said not in messages(app), "it stays")
        app.tick()
        assert said not in messages(app)


async def test_flood_of_messages_leaves_the_event_loop_running(
    core: LiveEngine, served: Served
) -> None:
    async with reading(served.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
        turns = 0
        for _ in range(4):
            before = client.feed.model.seq
            for n in range(1500):
                core.runtime.events.add(core.runtime.step, "server", f"event {n}", {})
            core.publish()
            while client.feed.model.seq < before + 1500:
                await asyncio.sleep(0)
                turns += 1
        assert turns > 6000 / 64


async def test_cancelled_client_is_closed(served: Served) -> None:
    async with reading(served.url) as client:
        await until(lambda: client.feed.connection.is_live, "never live")
    assert client.feed.connection.state is State.CLOSED


@contextlib.asynccontextmanager
async def without_vtoken() -> AsyncIterator[int]:
    """The port of a server that refuses the stream."""
    other = uvicorn.Server(uvicorn.Config(Starlette(), port=0, log_level="error", lifespan="off"))
    other.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(other.serve(sockets=[listener]))
        try:
            await until(lambda: other.started, "not started")
            yield listener.getsockname()[1]
        finally:
            other.should_exit = True
            await task


@contextlib.asynccontextmanager
async def without_websockets() -> AsyncIterator[int]:
    """The port of a server that answers in HTTP/1.0, which no stream begins with."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        serving = asyncio.create_task(asyncio.to_thread(other.serve_forever, 0.05))
        yield other.server_port
        other.shutdown()
        await serving


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("server", [without_vtoken, without_websockets])
async def test_server_without_vtoken_is_reported_as_such(
    server: Callable[[], AbstractAsyncContextManager[int]],
) -> None:
    async with server() as port:
        app = ConsoleApp(f"http://127.0.0.1:{port}")
        async with app.run_test(size=(80, 24)):
            expected = "vToken is not enabled there"
            await until(lambda: expected in " ".join(screen_text(app).split()), "not named")
            await until(lambda: "vtoken serve MODEL" in screen_text(app), "no way out")
            assert "VTOKEN_TOKEN" not in screen_text(app)
