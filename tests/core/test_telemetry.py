"""Telemetry: no work without subscribers, the newest state on subscription, and no delay of the
engine by a reader that stalls or dies.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.core.harness import LiveEngine, make_engine
from vtoken.control.telemetry import Publisher
from vtoken.core.runtime.events import EventLog
from vtoken.wire import TOPIC_EVENTS, TOPIC_STATE, Event, Frame


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    with make_engine(max_hz=1e6) as live:
        yield live


@pytest.fixture
def subscribe(engine: LiveEngine) -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Connected sockets that the publisher has seen."""
    sockets: list[zmq.Socket[bytes]] = []

    def connect(*topics: bytes, high_water_mark: int = 1000) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        sockets.append(socket)
        socket.connect(engine.publisher.endpoint)
        for topic in topics:
            socket.subscribe(topic)
        deadline = time.monotonic() + 5
        while not all(engine.publisher._subscribers[topic] for topic in topics):
            assert time.monotonic() < deadline
            engine.publisher._read_subscriptions()
        return socket

    yield connect
    for socket in sockets:
        socket.close()


def state(socket: zmq.Socket[bytes]) -> Frame:
    topic, payload = socket.recv_multipart()
    assert topic == TOPIC_STATE
    return msgspec.msgpack.decode(payload, type=Frame)


def must_not_be_called(*, with_status: bool) -> Frame:
    raise AssertionError("a frame was made without a subscriber")


def test_no_frame_is_made_while_nobody_listens(engine: LiveEngine) -> None:
    engine.publisher.publish(must_not_be_called, force=True)


def test_events_wait_for_a_listener_and_come_in_order(
    engine: LiveEngine, subscribe: Callable[..., zmq.Socket[bytes]]
) -> None:
    engine.steps(30)
    socket = subscribe(TOPIC_EVENTS)
    engine.publisher.publish(must_not_be_called)
    topic, payload = socket.recv_multipart()
    assert topic == TOPIC_EVENTS
    events = msgspec.msgpack.decode(payload, type=list[Event])
    assert [e.seq for e in events] == [*range(1, engine.core.runtime.events.last_seq + 1)]
    engine.publisher.publish(must_not_be_called)
    assert socket.poll(50) == 0


def test_a_new_subscriber_gets_the_newest_state_at_once() -> None:
    """Also at a rate of one frame a day."""
    live = make_engine(max_hz=1 / 86_400)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    try:
        live.steps(7)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(live.publisher.endpoint)
        socket.subscribe(TOPIC_STATE)
        deadline = time.monotonic() + 5
        while not socket.poll(10):
            assert time.monotonic() < deadline
            live.publisher.publish(live.controller.frame)
        frame = state(socket)
        assert frame.status is not None
        assert (frame.step, frame.status.step) == (7, 7)
        assert frame.status.epoch == "test-epoch"
        assert len(frame.live) == 2 * live.core.store.num_blocks
        assert len(frame.flags) == live.core.store.num_blocks
        assert {row.id for row in frame.requests or ()} == {r.id for r in live.core.running}
        live.steps(5)
        assert socket.poll(50) == 0  # the rate holds from then on
    finally:
        socket.close()
        live.close()


def test_a_stalled_reader_loses_frames_and_never_blocks_the_engine(
    engine: LiveEngine, subscribe: Callable[..., zmq.Socket[bytes]]
) -> None:
    stalled = subscribe(TOPIC_STATE, high_water_mark=1)
    engine.steps(30)
    padding = engine.controller.frame()
    assert padding.status is not None
    padding.status.model = "x" * (1 << 18)
    num_frames = 2000  # half a gigabyte would be buffered if nothing were lost
    made = 0
    for _ in range(num_frames):
        engine.publisher.publish(lambda with_status: padding, force=True)  # noqa: ARG005
        made += 1
    assert made == num_frames
    received = 0
    stalled.setsockopt(zmq.RCVTIMEO, 200)
    try:
        while True:
            stalled.recv_multipart()
            received += 1
    except zmq.Again:
        pass
    assert received < num_frames


def test_a_reader_that_dies_is_forgotten(
    engine: LiveEngine, subscribe: Callable[..., zmq.Socket[bytes]]
) -> None:
    socket = subscribe(TOPIC_STATE, TOPIC_EVENTS)
    socket.close()
    deadline = time.monotonic() + 5
    while any(engine.publisher._subscribers.values()):
        assert time.monotonic() < deadline
        engine.publisher._read_subscriptions()
    engine.publisher.publish(must_not_be_called, force=True)


def test_one_of_two_readers_that_leaves_does_not_silence_the_other(
    engine: LiveEngine, subscribe: Callable[..., zmq.Socket[bytes]]
) -> None:
    first, second = subscribe(TOPIC_STATE), subscribe(TOPIC_STATE)
    first.close()
    time.sleep(0.05)
    engine.steps(3)
    engine.publisher.publish(engine.controller.frame, force=True)
    assert state(second).step >= 0


def test_the_endpoint_is_a_private_directory_that_goes_with_the_publisher() -> None:
    publisher = Publisher(EventLog())
    socket_path = Path(publisher.endpoint.removeprefix("ipc://"))
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
    assert socket_path.exists()
    publisher.close()
    assert not socket_path.parent.exists()


class Clocks:
    """Elapsed and CPU time [s], which pass when a test says so."""

    now = cpu = 100.0

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds


@pytest.mark.parametrize("waits_s", [0.0, 5.0])
def test_frames_and_events_take_their_share_of_the_time_and_no_more(
    engine: LiveEngine, waits_s: float
) -> None:
    """Sending events is paid by the pace of frames; time spent waiting costs nothing."""
    clocks, log, frames = Clocks(), EventLog(), 0
    publisher = Publisher(
        log, max_hz=1e6, max_share=0.25, clock=lambda: clocks.now, cpu_clock=lambda: clocks.cpu
    )

    class Slow:
        """An encoder of events that takes 4 ms, like a frame."""

        def encode(self, _: object) -> bytes:
            clocks.work(0.004)
            return b""

        encode_into = publisher._encoder.encode_into

    def make_frame(*, with_status: bool) -> Frame:
        nonlocal frames
        frames += 1
        clocks.work(0.004)
        clocks.now += waits_s
        return engine.controller.frame(with_status=with_status)

    try:
        publisher._encoder = Slow()  # type: ignore[assignment]
        publisher._subscribers |= {TOPIC_STATE: True, TOPIC_EVENTS: True}
        for _ in range(20):  # until the cost of a frame is known
            log.add(1, "server", "", {})
            publisher.publish(make_frame)
            clocks.now += 10.0
        frames, began, spent = 0, clocks.now, clocks.cpu
        while frames < 100:
            if clocks.cpu - spent <= 0.008 * frames:  # one event a frame
                log.add(1, "server", "", {})
            publisher.publish(make_frame)
            clocks.now += 0.001
        waited = frames * waits_s
    finally:
        publisher.close()
    assert (clocks.cpu - spent) / (clocks.now - began) < 0.26
    assert clocks.now - began - waited < 4  # 100 frames of 8 ms, at a quarter of the time


def test_the_status_comes_seldom_but_with_every_request_that_comes_or_goes(
    engine: LiveEngine, subscribe: Callable[..., zmq.Socket[bytes]]
) -> None:
    socket, publisher = subscribe(TOPIC_STATE), engine.publisher
    engine.steps(5)
    publisher._next_status = float("inf")
    engine.steps(3)
    engine.core.remove(engine.core.running[0].id)
    engine.steps()
    publisher._next_status = float("inf")
    engine.steps()
    publisher._next_status = 0.0
    engine.steps()
    frames = [state(socket) for _ in range(11)]
    assert [frame.status is not None for frame in frames[5:]] == [False] * 3 + [True, False, True]
    for frame in frames:
        assert (frame.status is None) == (frame.requests is None) == (frame.config is None)


def test_every_new_subscriber_gets_a_status_at_once(
    engine: LiveEngine, subscribe: Callable[..., zmq.Socket[bytes]]
) -> None:
    subscribe(TOPIC_STATE)
    engine.steps(3)
    engine.publisher._next_status = float("inf")
    second = subscribe(TOPIC_STATE)
    deadline = time.monotonic() + 30
    while not (second.poll(10) and state(second).status):
        assert time.monotonic() < deadline
        engine.steps()
