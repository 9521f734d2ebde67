"""The websocket stream against a scripted engine: order, deltas, pace, loss, resume, refusals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import websockets
from starlette.requests import HTTPConnection

from tests.support.scripted import ScriptedEngine
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.wire.reducer import StreamState, apply
from vtoken_api.fanout import subscriber as subscriber_module
from vtoken_api.fanout.subscriber import MAX_QUEUED, StreamQuery, Subscriber
from vtoken_api.stream.endpoint import parse_query


@pytest.fixture
async def served(engine: ScriptedEngine) -> AsyncIterator[Served]:
    async with serve(engine.handle) as served:
        yield served


class Client:
    """A stream client that decodes strictly and rebuilds the state from the messages."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.connection = connection
        self.messages: list[wire.StreamMessage] = []
        self.state = StreamState()

    async def next(self) -> wire.StreamMessage:
        data = await asyncio.wait_for(self.connection.recv(), LIMIT_S)
        codec = msgspec.json if isinstance(data, str) else msgspec.msgpack
        message: wire.StreamMessage = codec.decode(data, type=wire.StreamMessage)
        assert message.seq == len(self.messages) + 1
        self.messages.append(message)
        self.state = apply(self.state, message)
        return message

    @property
    def event_seqs(self) -> list[int]:
        """The numbers of the events that came, in their order."""
        return [m.event.seq for m in self.messages if isinstance(m, wire.EventMessage)]

    async def until(self, kind: type, count: int = 1) -> Any:
        while True:
            message = await self.next()
            if isinstance(message, kind):
                count -= 1
                if not count:
                    return message


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    async with websockets.connect(url) as connection:
        yield Client(connection)


def parse(query: str) -> StreamQuery:
    scope = {"type": "websocket", "query_string": query.encode(), "headers": []}
    return parse_query(HTTPConnection(scope))


async def settled(engine: ScriptedEngine, topic: bytes, wanted: bool = True) -> None:
    """Wait until `topic` is subscribed at the engine, or not."""
    async with asyncio.timeout(LIMIT_S):
        while (topic in engine.poll_subscriptions()) is not wanted:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_snapshot_and_deltas_rebuild_the_engines_state(
    served: Served, engine: ScriptedEngine, encoding: str
) -> None:
    url = f"{served.stream_url}?fps=30&format={encoding}"
    async with connected(url) as client:
        hello, snapshot = await client.next(), await client.next()
        assert isinstance(hello, wire.Hello)
        assert isinstance(snapshot, wire.Snapshot)
        assert hello.can_control
        await settled(engine, wire.TOPIC_STATE)
        for _ in range(20):
            engine.step()
            engine.publish_frame()
            await client.until(wire.Delta)
        assert client.state.status is not None
        assert client.state.status.step == engine.steps == 20
        np.testing.assert_array_equal(client.state.live, engine.live)
        np.testing.assert_array_equal(client.state.flags, engine.flags)
        np.testing.assert_array_equal(client.state.owner, engine.owner)
        assert client.state.requests == engine.rows
        kind = bytes if encoding == "msgpack" else list
        assert isinstance(snapshot.live, kind)


async def test_state_is_coalesced_to_the_newest_frame(
    served: Served, engine: ScriptedEngine
) -> None:
    async with connected(served.stream_url + "?fps=2&topics=blocks,metrics") as client:
        await client.until(wire.Snapshot)
        await settled(engine, wire.TOPIC_STATE)
        started = time.monotonic()
        for _ in range(200):
            engine.step()
            engine.publish_frame()
        while client.state.status is None or client.state.status.step != 200:
            await client.until(wire.Delta)
        num_periods = 2 * (time.monotonic() - started)  # at 2 a second
        deltas = [m for m in client.messages if isinstance(m, wire.Delta)]
        assert len(deltas) <= num_periods + 2 < 200
        np.testing.assert_array_equal(client.state.live, engine.live)
        assert client.state.requests == {}


async def test_engine_is_asked_to_publish_state_only_while_somebody_looks(
    served: Served, engine: ScriptedEngine
) -> None:
    await settled(engine, wire.TOPIC_EVENTS)
    assert wire.TOPIC_STATE not in engine.poll_subscriptions()
    async with connected(served.stream_url + "?topics=events") as client:
        await client.until(wire.Snapshot)
        assert wire.TOPIC_STATE not in engine.poll_subscriptions()
    async with connected(served.stream_url) as client:
        await client.until(wire.Snapshot)
        await settled(engine, wire.TOPIC_STATE)
    await settled(engine, wire.TOPIC_STATE, wanted=False)


async def test_idle_engine_is_asked_so_that_state_never_goes_stale(
    served: Served, engine: ScriptedEngine
) -> None:
    async with connected(served.stream_url) as client:
        await client.until(wire.Snapshot)
        engine.step()
        await client.until(wire.Delta)
        np.testing.assert_array_equal(client.state.live, engine.live)


async def test_silence_is_filled_with_heartbeats(served: Served) -> None:
    async with connected(served.stream_url + "?topics=events") as client:
        await client.until(wire.Heartbeat, 2)
        kinds = [type(message) for message in client.messages]
        assert kinds == [wire.Hello, wire.Snapshot, wire.Heartbeat, wire.Heartbeat]


async def test_events_arrive_in_order_without_loss_whatever_the_frame_rate(
    served: Served, engine: ScriptedEngine
) -> None:
    async with connected(served.stream_url + "?fps=0.1") as client:
        await client.until(wire.Snapshot)
        await settled(engine, wire.TOPIC_EVENTS)
        for _ in range(100):
            engine.publish_events(engine.add_events(7))
        await client.until(wire.EventMessage, 700)
        assert client.event_seqs == list(range(1, 701))


async def test_event_lost_on_the_way_is_fetched_from_the_engine(
    served: Served, engine: ScriptedEngine
) -> None:
    async with connected(served.stream_url) as client:
        await client.until(wire.Snapshot)
        await settled(engine, wire.TOPIC_EVENTS)
        engine.publish_events(engine.add_events(2))
        engine.add_events(3)  # never published
        engine.publish_events(engine.add_events(1))
        await client.until(wire.EventMessage, 6)
        assert client.event_seqs == [1, 2, 3, 4, 5, 6]


async def test_event_that_nobody_holds_is_told_as_dropped(
    served: Served, engine: ScriptedEngine
) -> None:
    async with connected(served.stream_url) as client:
        await client.until(wire.Snapshot)
        await settled(engine, wire.TOPIC_EVENTS)
        engine.publish_events(engine.add_events(1))
        engine.add_events(4)
        engine.held.clear()
        engine.publish_events(engine.add_events(1))
        assert (await client.until(wire.EventMessage)).event.seq == 1
        dropped = await client.until(wire.Dropped)
        assert dropped.n == 4
        assert isinstance(await client.next(), wire.Snapshot)
        assert (await client.until(wire.EventMessage)).event.seq == 6


async def test_stalled_client_loses_events_at_the_bound_and_is_told_how_many(
    served: Served, engine: ScriptedEngine
) -> None:
    """A subscriber whose send blocks while more events arrive than its queue holds."""
    sent: list[wire.StreamMessage] = []
    gate = asyncio.Event()

    async def send(data: bytes) -> None:
        sent.append(msgspec.msgpack.decode(data, type=wire.StreamMessage))
        if isinstance(sent[-1], wire.EventMessage):
            await gate.wait()

    subscriber = Subscriber(served.engine.hub, parse("topics=events&format=msgpack"), send)
    await subscriber.prepare()
    running = asyncio.create_task(subscriber.run())
    subscriber.offer(engine.add_events(10), 0)
    async with asyncio.timeout(LIMIT_S):
        while len(sent) < 3:
            await asyncio.sleep(0.01)
        subscriber.offer(engine.add_events(MAX_QUEUED), 0)
        subscriber.offer(engine.add_events(5), 0)
        gate.set()
        while len(sent) < 10:
            await asyncio.sleep(0.01)
    running.cancel()
    hello, snapshot, first, dropped, fresh, *rest = sent
    assert isinstance(hello, wire.Hello)
    assert isinstance(snapshot, wire.Snapshot)
    assert isinstance(first, wire.EventMessage)
    assert first.event.seq == 1
    assert isinstance(dropped, wire.Dropped)
    assert dropped.n == 9 + MAX_QUEUED
    assert isinstance(fresh, wire.Snapshot)
    seqs = [message.event.seq for message in rest if isinstance(message, wire.EventMessage)]
    assert seqs == list(range(MAX_QUEUED + 11, MAX_QUEUED + 16))
    assert [message.seq for message in sent] == list(range(1, 11))


async def test_an_overfull_queue_keeps_what_operators_look_for_later(
    served: Served, engine: ScriptedEngine
) -> None:
    """A client too slow for relocation events still gets the config and the violation event."""
    sent: list[wire.StreamMessage] = []
    gate = asyncio.Event()

    async def send(data: bytes) -> None:
        await gate.wait()
        sent.append(msgspec.msgpack.decode(data, type=wire.StreamMessage))

    subscriber = Subscriber(served.engine.hub, parse("topics=events&format=msgpack"), send)
    await subscriber.prepare()
    events = engine.add_events(MAX_QUEUED + 3)
    for event in events:
        event.kind = "relocation"
    events[1].kind, events[-2].kind = "config", "violation"
    subscriber.offer(events[:100], 0)
    subscriber.offer(events[100:], 0)
    running = asyncio.create_task(subscriber.run())
    gate.set()
    async with asyncio.timeout(LIMIT_S):
        while len(sent) < 6:
            await asyncio.sleep(0.01)
    running.cancel()
    dropped, fresh, *rest = sent[2:]
    assert isinstance(dropped, wire.Dropped)
    assert dropped.n == MAX_QUEUED + 1
    assert isinstance(fresh, wire.Snapshot)
    kept = [message.event for message in rest if isinstance(message, wire.EventMessage)]
    assert [event.kind for event in kept] == ["config", "violation"]
    assert served.engine.hub.num_dropped == MAX_QUEUED + 1


async def test_client_that_reads_nothing_is_closed_and_harms_nobody(
    served: Served, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SEND_TIMEOUT_S", 0.3)
    stalled = await websockets.connect(
        served.stream_url, max_queue=1, ping_interval=None, compression=None
    )
    async with connected(served.stream_url + "?fps=30&topics=blocks") as quick:
        await quick.until(wire.Snapshot)
        await settled(engine, wire.TOPIC_STATE)
        assert served.engine.hub.num_clients == 2
        async with asyncio.timeout(LIMIT_S):
            while served.engine.hub.num_clients == 2:
                events = engine.add_events(10)
                for event in events:
                    event.data = {"padding": "x" * 50_000}
                engine.publish_events(events)
                engine.step()
                engine.publish_frame()
                await quick.until(wire.Delta)
        engine.step()
        engine.publish_frame()
        await quick.until(wire.Delta)
        np.testing.assert_array_equal(quick.state.live, engine.live)
    stalled.transport.abort()


async def test_killed_client_is_forgotten(served: Served, engine: ScriptedEngine) -> None:
    connection = await websockets.connect(served.stream_url)
    await Client(connection).until(wire.Snapshot)
    assert served.engine.hub.num_clients == 1
    connection.transport.abort()
    async with asyncio.timeout(LIMIT_S):
        while served.engine.hub.num_clients:
            await asyncio.sleep(0.01)
    await settled(engine, wire.TOPIC_STATE, wanted=False)


async def test_resumed_client_gets_what_it_missed_once_and_in_order(
    served: Served, engine: ScriptedEngine
) -> None:
    await settled(engine, wire.TOPIC_EVENTS)
    engine.publish_events(engine.add_events(10))
    async with connected(served.stream_url + "?resume=e1:4") as client:
        hello = await client.next()
        assert isinstance(hello, wire.Hello)
        assert hello.resumed
        assert isinstance(await client.next(), wire.Snapshot)
        engine.publish_events(engine.add_events(3))
        await client.until(wire.EventMessage, 9)
        assert client.event_seqs == [5, 6, 7, 8, 9, 10, 11, 12, 13]


async def test_event_replayed_to_a_resumed_client_is_not_sent_again_when_it_comes_live(
    served: Served, engine: ScriptedEngine
) -> None:
    await settled(engine, wire.TOPIC_EVENTS)
    under_way = engine.add_events(10)
    async with connected(served.stream_url + "?resume=e1:4") as client:
        await client.until(wire.EventMessage, 6)
        engine.publish_events(under_way[:7])
        engine.publish_events([*under_way[7:], *engine.add_events(2)])
        await client.until(wire.EventMessage, 2)
        assert client.event_seqs == [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("place", ["e0:4", "e1:99", "e1:1"], ids=["epoch", "future", "not held"])
async def test_client_that_cannot_resume_is_told_and_starts_afresh(
    served: Served, engine: ScriptedEngine, place: str
) -> None:
    await settled(engine, wire.TOPIC_EVENTS)
    engine.publish_events(engine.add_events(10))
    del engine.held[:5]
    async with connected(f"{served.stream_url}?resume={place}") as client:
        hello = await client.next()
        assert isinstance(hello, wire.Hello)
        assert not hello.resumed
        assert isinstance(await client.next(), wire.Snapshot)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("topics=blocks,bloks", "topics"),
        ("topics=", "topics"),
        ("fps=31", "fps"),
        ("fps=nan", "fps"),
        ("format=xml", "format"),
        ("resume=e1", "resume"),
        ("fsp=3", "fsp"),
        ("fps=1&fps=2", "fps"),
    ],
)
async def test_bad_query_is_refused_before_the_handshake(
    served: Served, query: str, field: str
) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        await websockets.connect(f"{served.stream_url}?{query}")
    response = refused.value.response
    assert response.status_code == 422
    assert response.headers["Content-Type"] == "application/problem+json"
    problem = msgspec.json.decode(response.body or b"", type=wire.Problem)
    assert problem.field == field
    assert problem.bound


async def test_stream_of_a_dead_engine_is_refused_with_503(served: Served) -> None:
    served.client.errored = True
    with pytest.raises(websockets.InvalidStatus) as refused:
        await websockets.connect(served.stream_url)
    assert refused.value.response.status_code == 503


async def test_stream_ends_when_the_engine_dies(served: Served) -> None:
    async with connected(served.stream_url) as client:
        await client.until(wire.Snapshot)
        served.client.errored = True
        with pytest.raises(websockets.ConnectionClosedError):
            await client.until(wire.Hello)
        assert client.connection.close_code == 4503


async def test_server_stops_with_clients_connected(engine: ScriptedEngine) -> None:
    async with serve(engine.handle) as served:
        connection = await websockets.connect(served.stream_url)
        client = Client(connection)
        await client.until(wire.Snapshot)
        await served.server.shutdown()
        with pytest.raises(websockets.ConnectionClosed):
            await client.until(wire.Hello)
        assert connection.close_code == 1012
    assert served.engine.hub.num_clients == 0
