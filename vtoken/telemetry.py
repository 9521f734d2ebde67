"""Telemetry out of the engine: a ZMQ publisher that costs nothing while nobody listens.

Knows the wire's topics; knows neither vLLM nor who subscribes. State frames go out at most
`max_hz` times a second, seldom enough to take `max_share` of the time at most, and only while
somebody subscribes to `state`; events go out as they come.
A subscriber that does not read loses messages at its high-water mark, alone and silently (events
are numbered, so it can tell); the engine never waits.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from vtoken.events import EventLog
from vtoken.wire import TOPIC_EVENTS, TOPIC_STATE, Frame

MAX_SHARE = 0.01  # of the engine's time that frames may take
LOOK_S = 0.02  # between two looks for new subscribers


class Publisher:
    """An XPUB socket on a Unix-domain endpoint of its own, readable by this user alone."""

    def __init__(
        self, events: EventLog, *, max_hz: float = 20.0, max_share: float = MAX_SHARE
    ) -> None:
        self._events = events
        self._period = 1.0 / max_hz
        self._max_share = max_share
        self._next_frame = 0.0
        self._next_look = 0.0
        self._subscribers = {TOPIC_STATE: False, TOPIC_EVENTS: False}
        self._directory = tempfile.TemporaryDirectory(prefix="vtoken-")  # mode 0700
        self.endpoint = f"ipc://{Path(self._directory.name) / 'telemetry'}"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 256)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()  # of the newest frame; a new one a frame would cost page faults

    def publish(self, make_frame: Callable[[], Frame], *, force: bool = False) -> None:
        """Send pending events, and a frame when one is due and wanted; `force` ignores the rate."""
        now = time.monotonic()
        if force or now >= self._next_look:
            self._next_look = now + LOOK_S
            self._read_subscriptions()
        if self._subscribers[TOPIC_EVENTS]:
            events = self._events.drain()
            if events:
                self._send(TOPIC_EVENTS, self._encoder.encode(events))
        if not self._subscribers[TOPIC_STATE]:
            return
        if force or now >= self._next_frame:
            started = time.monotonic()
            self._encoder.encode_into(make_frame(), self._buffer)
            self._send(TOPIC_STATE, self._buffer)
            cost = time.monotonic() - started
            self._next_frame = now + max(self._period, cost / self._max_share)

    def close(self) -> None:
        self._socket.close()
        self._directory.cleanup()

    def _read_subscriptions(self) -> None:
        while self._socket.poll(0, zmq.POLLIN):
            message = self._socket.recv()
            if message[1:] in self._subscribers:
                self._subscribers[message[1:]] = message[:1] == b"\x01"
                self._next_frame = 0.0

    def _send(self, topic: bytes, payload: bytes | bytearray) -> None:
        self._socket.send_multipart([topic, payload], zmq.NOBLOCK)
