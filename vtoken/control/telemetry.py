"""Telemetry out of the engine: a ZMQ publisher that costs nothing without subscribers.

Independent of vLLM and of the subscribers. Events are sent as they occur. State frames are sent
only while `state` has a subscriber, at most `max_hz` times a second, and rarely enough that
telemetry takes at most `max_share` of the calling thread's CPU time. Only some frames contain
the status, which costs as much as the map of blocks but is read less often.
A subscriber that does not read loses messages at its high-water mark without affecting others; it
detects lost events by their numbers, and lost frames are replaced by the next one. The engine never
waits. After every new subscription to `state` the next frame has the status.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from vtoken.core.runtime.events import EventLog
from vtoken.wire import TOPIC_EVENTS, TOPIC_STATE, Frame

# Share of the engine's time. The limit is 1%, which includes the steps that send nothing.
MAX_SHARE = 0.009
SMOOTHING = 0.25  # of a frame's cost, so that a few expensive frames do not change the pace
STATUS_EVERY = 10  # at `max_hz`, one frame in this many has the status
POLL_S = 0.25  # interval of the polls for new subscribers
SEND_HWM = 32  # messages that a subscriber may be behind: a frame of a large pool has megabytes


class MakeFrame(Protocol):
    def __call__(self, *, with_status: bool) -> Frame:
        """The current state; `with_status`: with status, rows and configuration, else optional."""


class Publisher:
    """An XPUB socket on its own Unix-domain endpoint, accessible only to this user."""

    def __init__(
        self,
        events: EventLog,
        *,
        max_hz: float = 20.0,
        max_share: float = MAX_SHARE,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._events = events
        self._period = 1.0 / max_hz
        self._max_share = max_share
        self._next_frame = 0.0
        self._next_status = 0.0
        self._next_poll = 0.0
        self._spent = 0.0  # CPU time since the last frame
        self._cost = 0.0  # CPU time of a frame and the events before it, exponential mean
        self._subscribers = {TOPIC_STATE: False, TOPIC_EVENTS: False}
        self._directory = tempfile.TemporaryDirectory(prefix="vtoken-")  # mode 0700
        self.endpoint = f"ipc://{Path(self._directory.name) / 'telemetry'}"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # report repeated subscriptions too
        self._socket.bind(self.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()  # reused: a new buffer per frame would cost page faults

    def publish(self, make_frame: MakeFrame, *, force: bool = False) -> None:
        """Send pending events, and a frame if due and subscribed to; `force` ignores the rate."""
        now = self._clock()
        if force or now >= self._next_poll:
            self._next_poll = now + POLL_S
            self._read_subscriptions()
            now = self._clock()
        events = self._events.drain() if self._subscribers[TOPIC_EVENTS] else []
        due = self._subscribers[TOPIC_STATE] and (force or now >= self._next_frame)
        if not events and not due:
            return
        started = self._cpu_clock()
        if events:
            self._send(TOPIC_EVENTS, self._encoder.encode(events))
        if due:
            frame = make_frame(with_status=force or now >= self._next_status)
            if frame.status is not None:
                self._next_status = now + STATUS_EVERY * self._period
            self._encoder.encode_into(frame, self._buffer)
            self._send(TOPIC_STATE, self._buffer)
        self._spent += self._cpu_clock() - started
        if due:
            self._cost += SMOOTHING * (self._spent - self._cost)
            self._spent = 0.0
            # Counted from the time it was due, so waiting for the end of a step does not slow the
            # pace. A delay of more than one period is not made up for.
            pause = max(self._period, self._cost / self._max_share)
            self._next_frame = min(now, max(self._next_frame, now - pause)) + pause

    def close(self) -> None:
        self._socket.close()
        self._directory.cleanup()

    def _read_subscriptions(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # far cheaper than `poll`
            message = self._socket.recv()
            topic, joined = message[1:], message[:1] == b"\x01"
            if topic in self._subscribers:
                self._subscribers[topic] = joined
            if topic == TOPIC_STATE and joined:
                self._next_frame = self._next_status = self._clock()

    def _send(self, topic: bytes, payload: bytes | bytearray) -> None:
        self._socket.send_multipart([topic, payload], zmq.NOBLOCK)
