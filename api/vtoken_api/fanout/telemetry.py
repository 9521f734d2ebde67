"""The ZMQ subscriber of the engine's telemetry: frames on demand, events always.

The reader subscribes to the state topic only while a client wants state, because the engine
publishes frames only for subscribers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from vtoken import wire

EVENTS_HWM = 100_000  # messages, each with the events of one step
STATE_HWM = 4  # frames: the newest replaces those before it


class TelemetryReader:
    """Two SUB sockets on one endpoint. `on_frame` and `on_events` take what was decoded."""

    def __init__(
        self,
        endpoint: str,
        on_frame: Callable[[wire.Frame], None],
        on_events: Callable[[list[wire.Event]], Awaitable[None]],
    ) -> None:
        self._on_frame = on_frame
        self._on_events = on_events
        self._context = zmq.asyncio.Context()
        self._state = self._socket(endpoint, STATE_HWM)
        self._events = self._socket(endpoint, EVENTS_HWM)
        self._events.subscribe(wire.TOPIC_EVENTS)
        self._wanted = False

    def want_state(self, wanted: bool) -> None:
        """Subscribe to frames, or stop."""
        if wanted != self._wanted:
            self._wanted = wanted
            subscribe = self._state.subscribe if wanted else self._state.unsubscribe
            subscribe(wire.TOPIC_STATE)

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
            if self._wanted:
                self._on_frame(msgspec.msgpack.decode(payload, type=wire.Frame))

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
