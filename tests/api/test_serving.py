"""The server of the tests closes every connection that it took, also those of stalled clients."""

from __future__ import annotations

import asyncio
import base64
from asyncio.selector_events import _SelectorTransport
from typing import Any

import pytest

from tests.support.scripted import ScriptedEngine
from tests.support.served_core import serving


async def test_a_client_that_does_not_read_leaves_no_open_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    make = _SelectorTransport.__init__

    def note(transport: Any, *args: Any, **kwargs: Any) -> None:
        make(transport, *args, **kwargs)
        made.append(transport)

    monkeypatch.setattr(_SelectorTransport, "__init__", note)
    async with serving(ScriptedEngine(num_blocks=4_000_000)) as served:  # a snapshot of 16 MB
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        key = base64.b64encode(bytes(16)).decode()
        writer.write(
            f"GET /vtoken/v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        assert b"101 Switching" in await reader.readuntil(b"\r\n\r\n")
        await reader.read(1_000_000)  # the snapshot has begun; it is not read any further
    writer.close()
    await writer.wait_closed()
    assert made
    assert all(transport._sock is None for transport in made)
