"""Limits on calls: rates, and bodies that are too large, endless or slow."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
import websockets

from tests.support.scripted import ScriptedEngine
from tests.support.serving import serve
from tests.support.waiting import LIMIT_S, until
from vtoken_api.limits import Rate, RateLimits
from vtoken_api.problems import ProblemError
from vtoken_api.rest import inputs
from vtoken_api.stream.endpoint import MAX_CLIENT_MESSAGES

CONFIG = "/vtoken/v1/config"


@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_connection_that_ends_inside_a_body_changes_nothing_and_logs_no_fault(
    engine: ScriptedEngine, server_log: pytest.LogCaptureFixture, how: str
) -> None:
    async with serve(engine.handle) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(
            f"PATCH {CONFIG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            'Content-Type: application/json\r\n\r\n{"theta_f": '.encode()
        )
        await writer.drain()
        await until(lambda: served.server.server_state.tasks, "not received")
        if how == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: not served.server.server_state.tasks, "still served")
        assert served.calls_of("patch_config") == []
        assert [record for record in server_log.records if record.exc_info] == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bucket_gives_its_burst_then_its_rate_and_refuses_at_no_cost() -> None:
    clock = Clock()
    limits = RateLimits({"change": Rate(2, 3)}, clock=clock)
    for _ in range(3):
        limits.spend("a", "change")
    for _ in range(5):
        with pytest.raises(ProblemError) as refused:
            limits.spend("a", "change")
        assert refused.value.problem.status == 429
        assert refused.value.headers == {"Retry-After": "1"}
    limits.spend("b", "change")  # another address
    limits.spend("a", "read")  # another kind, not limited here
    clock.now += 0.5
    limits.spend("a", "change")
    with pytest.raises(ProblemError):
        limits.spend("a", "change")
    clock.now -= 100  # a clock that jumps back does not refill the bucket
    with pytest.raises(ProblemError):
        limits.spend("a", "change")


def test_retry_after_is_long_enough_to_pay_with() -> None:
    clock = Clock()
    limits = RateLimits({"read": Rate(0.5, 4)}, clock=clock)
    limits.spend("a", "read", 4)
    with pytest.raises(ProblemError) as refused:
        limits.spend("a", "read", 4)
    assert refused.value.headers is not None
    clock.now += float(refused.value.headers["Retry-After"])
    limits.spend("a", "read", 4)


def test_a_call_that_is_charged_afterwards_leaves_a_debt_that_time_pays_back() -> None:
    clock = Clock()
    limits = RateLimits({"time": Rate(0.05, 1.0)}, clock=clock)
    for seconds in (0.5, 0.5, 0.25):
        limits.require_no_debt("readers", "time")
        limits.charge("readers", "time", seconds)
    with pytest.raises(ProblemError) as refused:
        limits.require_no_debt("readers", "time")
    assert refused.value.problem.status == 429
    assert refused.value.headers == {"Retry-After": "5"}  # 0.25 s of debt at 0.05 s a second
    limits.require_no_debt("others", "time")
    clock.now += 4.9
    with pytest.raises(ProblemError):
        limits.require_no_debt("readers", "time")
    clock.now += 0.2
    limits.require_no_debt("readers", "time")


def test_memory_is_bounded_whatever_addresses_come() -> None:
    limits = RateLimits({"read": Rate(1, 1)}, max_payers=10)
    for number in range(1000):
        limits.spend(f"address {number}", "read")
    assert len(limits) == 10


async def test_address_that_calls_too_often_is_told_when_to_come_back(
    engine: ScriptedEngine,
) -> None:
    async with serve(engine.handle) as served:
        served.service.auth.limits = RateLimits(
            {"change": Rate(0.001, 2), "stream": Rate(0.001, 1)}
        )
        answers = [await served.http.post("/vtoken/v1/undo") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [404, 404, 429]
        assert int(answers[-1].headers["Retry-After"]) > 900
        assert answers[-1].headers["Content-Type"] == "application/problem+json"
        assert (await served.http.get("/vtoken/v1/events")).status_code == 200
        async with websockets.connect(served.stream_url) as stream:
            await asyncio.wait_for(stream.recv(), LIMIT_S)
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(served.stream_url)
        assert refused.value.response.status_code == 429
        assert [call.op for call in served.line.calls].count("undo") == 2


async def raw(url: str, *pieces: bytes, wait_s: float = 0.0) -> bytes:
    """Send raw bytes with a pause between the pieces; returns the answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(wait_s)
        return await asyncio.wait_for(reader.read(4096), LIMIT_S)
    finally:
        writer.close()


def head(*more: str) -> bytes:
    lines = [f"PATCH {CONFIG} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return ("\r\n".join([*lines, *more, "", ""])).encode()


async def test_body_that_says_it_is_too_long_is_refused_before_it_is_read(
    engine: ScriptedEngine,
) -> None:
    async with serve(engine.handle) as served:
        answer = await raw(served.url, head("Content-Length: 99999999999"))
        assert answer.startswith(b"HTTP/1.1 413")


async def test_endless_body_without_a_length_is_cut_off(engine: ScriptedEngine) -> None:
    async with serve(engine.handle) as served:
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        answer = await raw(served.url, head("Transfer-Encoding: chunked"), *[chunk] * 5)
        assert answer.startswith(b"HTTP/1.1 413")
        assert "patch_config" not in [call.op for call in served.line.calls]


async def test_body_that_does_not_arrive_is_given_up(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "BODY_TIMEOUT_S", 0.2)
    async with serve(engine.handle) as served:
        answer = await raw(served.url, head("Content-Length: 100"), b'{"theta')
        assert answer.startswith(b"HTTP/1.1 408")


async def test_stream_client_that_goes_on_talking_is_sent_away(engine: ScriptedEngine) -> None:
    async with (
        serve(engine.handle) as served,
        websockets.connect(served.stream_url) as stream,
    ):
        for _ in range(MAX_CLIENT_MESSAGES + 1):
            await stream.send("x")
        await asyncio.wait_for(stream.wait_closed(), LIMIT_S)
        assert stream.close_code == 4400
