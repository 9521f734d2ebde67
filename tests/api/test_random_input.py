"""Random input: REST calls drawn from the server's OpenAPI description, random websocket frames.

The server must give documented answers, continue to serve and log no internal error.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.live import LiveEngine, make_quiet
from tests.support.random_calls import DETERMINISTIC, call_at_random, described_operations
from tests.support.routes import openapi_document
from tests.support.serving import Served, serve_in_thread
from tests.support.waiting import LIMIT_S
from vtoken_api.log import logger
from vtoken_api.plugin import MOUNT_PATH

pytestmark = pytest.mark.slow  # hundreds of calls


def make_short() -> LiveEngine:
    """Two requests of the names that calls draw, one of which has given tokens for the other."""
    core = make_quiet(num_blocks=14)
    core.configure(budget_floor_tokens=32)
    core.admit("a", 100)
    core.admit("b", 80)
    core.steps(20)
    assert core.runtime.counters.pressure.given_tokens > 0
    return core


class Faults(logging.Handler):
    """The errors in the server's log; no input may cause one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    faults = Faults()
    logger.addHandler(faults)
    with serve_in_thread(make_short) as served:
        yield served
    logger.removeHandler(faults)
    assert faults.lines == []


@pytest.fixture(scope="module")
def operations(served: Served) -> dict[str, Any]:
    return described_operations(served.url)


PATHS = openapi_document()["paths"].values()
OPERATIONS = [operation["operationId"] for path in PATHS for operation in path.values()]


def test_every_operation_is_drawn_from(operations: dict[str, Any]) -> None:
    assert set(operations) == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_random_calls_are_answered_as_the_description_says(
    name: str, served: Served, operations: dict[str, Any]
) -> None:
    call_at_random(operations[name], served.url, max_examples=20)


def frame(opcode: int, payload: bytes, *, fin: bool, masked: bool, reserved: int) -> bytes:
    """A websocket frame (RFC 6455, 5.2), possibly an invalid one."""
    head = bytes([(fin << 7) | (reserved << 4) | opcode])
    mask = masked << 7
    if len(payload) < 126:
        head += bytes([mask | len(payload)])
    else:
        head += bytes([mask | 126]) + struct.pack(">H", len(payload))
    if not masked:
        return head + payload
    key = b"\x5a\x0f\xf0\xa5"
    return head + key + bytes(b ^ key[i % 4] for i, b in enumerate(payload))


FRAMES = st.builds(
    frame,
    st.integers(0, 15),
    st.binary(max_size=300) | st.just(b'{"type": "auth", "token": "x"}') | st.just(b"{" * 60_000),
    fin=st.booleans(),
    masked=st.booleans(),
    reserved=st.sampled_from([0, 0, 0, 1, 4, 7]),
)
TAILS = st.sampled_from([b"", b"\x81", b"\x81\xff" + b"\xff" * 8, b"\x82\xfe\xff\xff"])
QUERIES = st.sampled_from(["", "?fps=30", "?format=msgpack", "?topics=events"])


def handshake(path: str, key: str = "dGhlIHNhbXBsZSBub25jZQ==") -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: localhost",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def say(served: Served, head: bytes, *pieces: bytes) -> bytes:
    """Send `head`, read the head of the answer, send `pieces`, read what arrives at once."""
    host, port = served.url.removeprefix("http://").split(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as raw:
        raw.sendall(head)
        while b"\r\n\r\n" not in heard and (data := raw.recv(4096)):
            heard += data
        raw.settimeout(0.05)
        with contextlib.suppress(OSError):
            for piece in pieces:
                raw.sendall(piece)
            for _ in range(8):
                if not raw.recv(4096):
                    break
    return heard


def test_stream_survives_any_frames(served: Served) -> None:
    before = served.engine.hub.num_clients

    @settings(DETERMINISTIC, max_examples=40)
    @given(st.lists(FRAMES, max_size=20), TAILS, QUERIES)
    def send(frames: list[bytes], tail: bytes, query: str) -> None:
        heard = say(served, handshake(f"{MOUNT_PATH}/stream{query}"), b"".join(frames) + tail)
        assert heard.startswith(b"HTTP/1.1 101")

    send()
    assert httpx.get(served.url + MOUNT_PATH + "/status").status_code == 200
    for _ in range(100):
        if served.engine.hub.num_clients <= before:
            return
        httpx.get(served.url + MOUNT_PATH + "/policies")
    raise AssertionError("sessions of clients that have gone are still there")


@settings(DETERMINISTIC, max_examples=40)
@given(query=st.text(st.characters(codec="ascii", exclude_characters="#"), max_size=60))
def test_stream_refuses_any_query_before_the_handshake_or_serves_it(
    served: Served, query: str
) -> None:
    with httpx.Client(base_url=served.url) as http:
        path = f"{MOUNT_PATH}/stream?{quote(query, safe='=&%+,:;/?@!')}"
        heard = say(served, handshake(path)).partition(b"\r\n")[0]
        assert heard.split()[1] in (b"101", b"401", b"422"), heard
        assert http.get(MOUNT_PATH + "/policies").status_code == 200
