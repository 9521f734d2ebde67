"""Streams of both clients: order, gaps, resuming after a loss, errors that are not retried."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from websockets.http11 import Request
from websockets.server import ServerProtocol

from tests.support.client_harness import Either
from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.tls import TLS, self_signed
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.client import (
    AsyncClient,
    Client,
    NotVToken,
    ProblemError,
    Server,
    StreamClosed,
    StreamGap,
    Unauthorized,
    Unreachable,
)
from vtoken.client import stream as streams
from vtoken.client.stream import BACKOFF_S, AsyncStream, backoff_s


def happen(core: LiveEngine, count: int) -> None:
    """Publish `count` events as the events of one step."""
    for _ in range(count):
        core.runtime.events.add(0, "server", "test", {})
    core.publisher.publish(core.controller.frame)


def break_connections(served: Served) -> None:
    """Abort every connection without a closing handshake."""
    for connection in list(served.server.server_state.connections):
        connection.transport.abort()


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_stream_opens_with_hello_and_the_whole_state(
    either: Either, core: LiveEngine, encoding: Any
) -> None:
    async with either.stream(fps=30, format=encoding) as streaming:
        hello, snapshot = await streaming.next(), await streaming.next()
        assert isinstance(hello, wire.Hello)
        assert isinstance(snapshot, wire.Snapshot)
        assert isinstance(streaming.stream.raw, str if encoding == "json" else bytes)
        assert snapshot.live is not None
        live = wire.unpack_array(snapshot.live, "<u2")
        np.testing.assert_array_equal(live, core.reporter.live())


async def test_no_event_is_missed_over_a_loss(
    either: Either, served: Served, core: LiveEngine
) -> None:
    happen(core, 3)
    hellos: list[wire.Hello] = []
    seen: list[int] = []
    async with either.stream(["events"], resume="e1:0", reconnect=True) as streaming:
        while len(hellos) < 2 or seen[-1] < core.runtime.events.last_seq:
            message = await streaming.next()
            if isinstance(message, wire.Hello):
                hellos.append(message)
            elif isinstance(message, wire.EventMessage):
                seen.append(message.event.seq)
                assert streaming.stream.place == f"e1:{seen[-1]}"
                if len(seen) == 2:
                    break_connections(served)
                    happen(core, 4)
    assert [hello.resumed for hello in hellos] == [True, True]
    assert seen == list(range(1, core.runtime.events.last_seq + 1))


async def test_loss_of_a_stream_that_does_not_reconnect_is_raised(
    either: Either, served: Served
) -> None:
    async with either.stream(["events"]) as streaming:
        await streaming.until(wire.Snapshot)
        break_connections(served)
        with pytest.raises(StreamClosed, match="connection lost"):
            await streaming.next()


async def test_place_of_another_engine_is_not_resumed_and_not_kept(either: Either) -> None:
    async with either.stream(["events"], resume="other:7") as streaming:
        assert not (await streaming.until(wire.Hello)).resumed
        assert streaming.stream.place is None


async def test_stream_that_can_never_open_is_not_tried_again(kind: Any, core: LiveEngine) -> None:
    async with serve(core.handle, api_key=["sesame"]) as served:
        for server, error in (
            (Server(served.url, "wrong"), Unauthorized),
            (Server(f"{served.url}/v1"), NotVToken),
            (Server("http://127.0.0.1:9"), Unreachable),
        ):
            async with (
                Either(kind, server) as either,
                either.stream(["metrics"], reconnect=True) as streaming,
            ):
                with pytest.raises(error):
                    await streaming.next()
        async with Either(kind, Server(served.url, "sesame")) as either:
            for query in ({"fps": 1000.0}, {"topics": ["weather"]}, {"resume": "?"}):
                async with either.stream(**query) as streaming:
                    with pytest.raises(ProblemError) as refused:
                        await streaming.next()
                    assert refused.value.problem.status == 422
                    assert refused.value.problem.field in query


async def test_stream_is_left_from_another_thread(served: Served) -> None:
    with Client(served.url) as client:
        stream = client.stream(["events"])
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        async with asyncio.timeout(LIMIT_S):
            while not stream.raw:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(stream.close)
            messages = await reading
    assert isinstance(messages[0], wire.Hello)


async def test_stream_is_left_while_it_waits_to_reconnect(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BACKOFF_S", (1e6,))
    stream = Client(served.url).stream(["events"], reconnect=True)
    reading = asyncio.create_task(asyncio.to_thread(list, stream))
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: stream.raw, "no message")
        break_connections(served)
        await until(lambda: stream._stream._failures, "the loss is not seen")
        await asyncio.to_thread(stream.close)
        assert isinstance((await reading)[0], wire.Hello)
    assert not threads_of_streams()


@contextlib.asynccontextmanager
async def silent(tls: TLS | None = None) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A server that reads requests and answers none; whether it has one, and has lost the client.

    With TLS it begins as every server does, with tickets that no request asked for.
    """
    asked, left = asyncio.Event(), asyncio.Event()
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                asked.set()
        left.set()
        writer.close()

    async with await asyncio.start_server(read, "127.0.0.1", ssl=context) as server:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked, left


def threads_of_streams() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "vtoken stream"]


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
async def test_server_that_never_answers_is_given_up(
    kind: Any, encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "OPEN_S", 0.5)
    tls = self_signed(tmp_path) if encrypted else None
    async with silent(tls) as (url, asked, left):
        server = Server(url, cafile=None if tls is None else tls.authority)
        async with Either(kind, server) as either, either.stream() as streaming:
            with pytest.raises(Unreachable, match="no answer in time"):
                await streaming.next()
        await asyncio.wait_for(left.wait(), LIMIT_S)
        assert asked.is_set()


async def test_stream_is_left_while_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "OPEN_S", 1e6)
    async with silent() as (url, asked, left), asyncio.timeout(LIMIT_S):
        stream = Client(url).stream(reconnect=True)
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        await asked.wait()
        await asyncio.to_thread(stream.close)
        assert await reading == []
        await left.wait()
    assert list(stream) == []
    assert not threads_of_streams()


def test_interrupt_ends_a_stream_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "OPEN_S", 1e6)
    main = threading.get_ident()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def interrupt() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                signal.pthread_kill(main, signal.SIGINT)
                while connection.recv(1 << 16):
                    pass

        server = threading.Thread(target=interrupt)
        server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(KeyboardInterrupt), Client(url).stream() as stream:
            next(stream)
        server.join()
    assert not threads_of_streams()


# ---------------------------------------------------------------- without sockets


def message(seq: int) -> bytes:
    return msgspec.msgpack.encode(wire.Heartbeat(epoch="e1", seq=seq, step=0, ts=0.0))


def test_a_missing_or_repeated_message_cannot_pass_unseen() -> None:
    for second in (1, 3):
        stream = AsyncStream(Server("http://h"), ["events"], 1.0, "msgpack", None, False)
        stream._take(message(1))
        with pytest.raises(StreamGap, match=f"expected message 2, received {second}"):
            stream._take(message(second))


def test_a_message_of_another_schema_is_not_taken() -> None:
    stream = AsyncStream(Server("http://h"), ["events"], 1.0, "json", None, False)
    for raw in ("{}", '{"type": "weather"}', "no json"):
        with pytest.raises(NotVToken, match="does not fit the schema"):
            stream._take(raw)


def test_a_server_of_another_schema_is_refused_with_both_numbers() -> None:
    hello = wire.Hello(
        epoch="e",
        seq=1,
        step=0,
        ts=0.0,
        schema=2,
        vtoken_version="9.0",
        vllm_version="1.0",
        model="m",
        device="cpu",
        geometry=wire.Geometry(8, 16, 1, 1, 8, 64),
        policies=[],
        topics=["events"],
        fps=1.0,
        can_control=False,
    )
    stream = AsyncStream(Server("http://h"), ["events"], 1.0, "msgpack", None, False)
    with pytest.raises(NotVToken, match=r"schema 2 \(vToken 9.0\), this client schema 1"):
        stream._take(msgspec.msgpack.encode(hello))


def test_waits_grow_and_stop_growing() -> None:
    waits = [backoff_s(n) for n in range(1, 12)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (BACKOFF_S[0], BACKOFF_S[-1])


async def test_a_close_that_is_cancelled_ends_the_connection_at_once() -> None:
    async def serve_without_answers(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        protocol = ServerProtocol()
        protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
        (request,) = protocol.events_received()
        assert isinstance(request, Request)
        protocol.send_response(protocol.accept(request))
        writer.write(b"".join(protocol.data_to_send()))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):  # the closing frame among it
                pass
        writer.close()

    async with await asyncio.start_server(serve_without_answers, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        stream = AsyncClient(f"http://127.0.0.1:{port}").stream()
        reading = asyncio.create_task(anext(stream))
        socket = await until(lambda: stream._socket, "the client does not open")
        reading.cancel()
        await asyncio.wait([reading])
        closing = asyncio.create_task(stream.aclose())
        done, _ = await asyncio.wait([closing], timeout=0.1)
        assert not done  # it waits for the answer
        closing.cancel()
        await asyncio.wait([closing])
        assert socket.transport.is_closing()
