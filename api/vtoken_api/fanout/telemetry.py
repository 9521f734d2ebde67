"""The ZMQ subscriber of the engine's telemetry: frames on demand, events always.

The reader subscribes to the state topic only while a client wants state, because the engine
publishes frames only for subscribers. After a lost frame the reader subscribes again, since the
engine sends a full frame to every new subscriber. That frame may be lost too, so the reader repeats
this every `RESYNC_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from vtoken import wire

EVENTS_HWM = 100_000  # messages, each with the events of one step
STATE_HWM = 256  # frames
RESYNC_S = 1.0


class TelemetryReader:
    """Two SUB sockets on one endpoint. `on_frame` takes a payload and returns False if a frame
    before it is missing; `on_events` takes decoded events."""

    def __init__(
        self,
        endpoint: str,
        on_frame: Callable[[bytes], bool],
        on_events: Callable[[list[wire.Event]], Awaitable[None]],
    ) -> None:
        self._on_frame = on_frame
        self._on_events = on_events
        self._context = zmq.asyncio.Context()
        self._state = self._socket(endpoint, STATE_HWM)
        self._events = self._socket(endpoint, EVENTS_HWM)
        self._events.subscribe(wire.TOPIC_EVENTS)
        self._wanted = False
        self._subscribed_at = 0.0

    def want_state(self, wanted: bool) -> None:
        """Subscribe to frames, or stop."""
        if wanted != self._wanted:
            self._wanted = wanted
            if wanted:
                self._subscribe()
            else:
                self._state.unsubscribe(wire.TOPIC_STATE)

    def _subscribe(self) -> None:
        self._subscribed_at = time.monotonic()
        self._state.subscribe(wire.TOPIC_STATE)

    def _resync(self) -> None:
        if time.monotonic() - self._subscribed_at >= RESYNC_S:
            self._state.unsubscribe(wire.TOPIC_STATE)
            self._subscribe()

    async def run(self) -> None:
        """Read until cancelled, then close the sockets."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_frames())
                group.create_task(self._read_events())
        finally:
            self._context.destroy(linger=0)

    async def _read_frames(self) -> None:
        while True:
            _, payload = await self._state.recv_multipart()
            if self._wanted and not self._on_frame(payload):
                self._resync()

    async def _read_events(self) -> None:
        while True:
            _, payload = await self._events.recv_multipart()
            await self._on_events(msgspec.msgpack.decode(payload, type=list[wire.Event]))

    def _socket(self, endpoint: str, high_water_mark: int) -> Any:
        socket = self._context.socket(SocketType.SUB)
        socket.setsockopt(SocketOption.RCVHWM, high_water_mark)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.connect(endpoint)
        return socket
