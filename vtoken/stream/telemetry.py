"""Telemetry out of the engine: a ZMQ publisher that costs nothing while nobody listens.

Knows the wire's topics; knows neither vLLM nor who subscribes. State frames go out at most
`max_hz` times a second, seldom enough that all of this takes `max_share` of the time at most (in
CPU time of the calling thread), and only while somebody subscribes to `state`; events go out as
they come. Not every frame has the figures: they cost as much as the map of blocks, and nobody reads
as fast as a map is seen to move.
A subscriber that does not read loses messages at its high-water mark, alone and silently (events
and frames are numbered, so it can tell); the engine never waits. Whoever subscribes to `state`,
anew or again, is sent a whole frame next.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from vtoken.runtime.events import EventLog
from vtoken.stream.frames import FrameSequence
from vtoken.wire import TOPIC_EVENTS, TOPIC_STATE, Frame

# Of the engine's time. Telemetry may take 1%; the rest of that is steps in which nothing is sent.
MAX_SHARE = 0.009
SMOOTHING = 0.25  # of what frames cost: the pace stays even where a few cost much more
FIGURES_EVERY = 10  # of as many frames as `max_hz` allows, one has figures
LOOK_S = 0.25  # between two looks for new subscribers


class MakeFrame(Protocol):
    def __call__(self, *, figures: bool) -> Frame:
        """The state of this moment; without `figures` (status, rows, configuration) if it may."""


class Publisher:
    """An XPUB socket on a Unix-domain endpoint of its own, readable by this user alone."""

    def __init__(
        self, events: EventLog, *, max_hz: float = 20.0, max_share: float = MAX_SHARE
    ) -> None:
        self._events = events
        self._period = 1.0 / max_hz
        self._max_share = max_share
        self._next_frame = 0.0
        self._next_figures = 0.0
        self._next_look = 0.0
        self._spent = 0.0  # CPU time since the last frame
        self._cost = 0.0  # of a frame and what came with it, exponential mean
        self._frames = FrameSequence()
        self._whole = True  # somebody has nothing that changes could be applied to
        self._subscribers = {TOPIC_STATE: False, TOPIC_EVENTS: False}
        self._directory = tempfile.TemporaryDirectory(prefix="vtoken-")  # mode 0700
        self.endpoint = f"ipc://{Path(self._directory.name) / 'telemetry'}"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 256)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription is seen, not the first
        self._socket.bind(self.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()  # of the newest frame; a new one a frame would cost page faults

    def publish(self, make_frame: MakeFrame, *, force: bool = False) -> None:
        """Send pending events, and a frame when one is due and wanted; `force` ignores the rate."""
        now = time.monotonic()
        if force or now >= self._next_look:
            self._next_look = now + LOOK_S
            self._read_subscriptions()
            now = time.monotonic()
        events = self._events.drain() if self._subscribers[TOPIC_EVENTS] else []
        due = self._subscribers[TOPIC_STATE] and (force or now >= self._next_frame)
        if not events and not due:
            return
        started = time.thread_time()
        if events:
            self._send(TOPIC_EVENTS, self._encoder.encode(events))
        if due:
            frame = make_frame(figures=force or self._whole or now >= self._next_figures)
            if frame.status is not None:
                self._next_figures = now + FIGURES_EVERY * self._period
            frame = self._frames.next(frame, whole=self._whole)
            self._encoder.encode_into(frame, self._buffer)
            self._send(TOPIC_STATE, self._buffer)
            self._whole = False
        self._spent += time.thread_time() - started
        if due:
            self._cost += SMOOTHING * (self._spent - self._cost)
            self._spent = 0.0
            # Counted from when it was due: a frame waits for the end of a step, and the pace does
            # not suffer from that. What is late by more than a period is not made up for.
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
                self._whole, self._next_frame = True, time.monotonic()

    def _send(self, topic: bytes, payload: bytes | bytearray) -> None:
        self._socket.send_multipart([topic, payload], zmq.NOBLOCK)
