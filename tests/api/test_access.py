"""Who gets in: API key, read-only servers, foreign pages and host names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import websockets
from scripted import ScriptedEngine
from serving import serve

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()


async def test_api_key_guards_every_path_and_leaves_the_rest_of_the_server_alone(
    engine: ScriptedEngine,
) -> None:
    async with (
        serve(engine.handle, api_key=["sesame"]) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        for path in ("/vtoken/v1/events", "/vtoken/v1/nowhere"):
            answer = await http.get(path)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["Content-Type"] == "application/problem+json"
        assert (await http.get("/vtoken/v1/events", headers=KEY)).status_code == 200
        wrong = {"Authorization": "Bearer sesame2"}
        assert (await http.get("/vtoken/v1/events", headers=wrong)).status_code == 401
        assert (await http.get("/v1/models")).status_code == 200


async def test_stream_takes_the_key_as_header_or_as_first_message(engine: ScriptedEngine) -> None:
    async with serve(engine.handle, api_key=["sesame"]) as served:
        async with websockets.connect(served.stream_url, additional_headers=KEY) as stream:
            assert '"hello"' in str(await asyncio.wait_for(stream.recv(), 10))
        async with websockets.connect(served.stream_url) as stream:
            await stream.send('{"type": "auth", "token": "sesame"}')
            assert '"hello"' in str(await asyncio.wait_for(stream.recv(), 10))
        for first in ('{"type": "auth", "token": "x"}', "hello", b"\xff"):
            async with websockets.connect(served.stream_url) as stream:
                await stream.send(first)
                with pytest.raises(websockets.ConnectionClosedError):
                    await asyncio.wait_for(stream.recv(), 10)
                assert stream.close_code == 4401
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(
                served.stream_url, additional_headers={"Authorization": "Bearer no"}
            )
        assert refused.value.response.status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", None, "192.0.2.1", "example.org"])
async def test_server_bound_to_more_than_loopback_is_read_only_and_says_so(
    engine: ScriptedEngine, host: str | None, server_log: pytest.LogCaptureFixture
) -> None:
    async with (
        serve(engine.handle, host=host) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        assert "read-only" in server_log.text
        for method, path in (("PATCH", "config"), ("POST", "undo"), ("POST", "compactions")):
            answer = await http.request(method, f"/vtoken/v1/{path}", json={})
            assert answer.status_code == 403
            assert answer.json()["title"] == "Read-only"
        assert (await http.get("/vtoken/v1/events")).status_code == 200
        async with websockets.connect(served.stream_url) as stream:
            assert '"can_control":false' in str(await asyncio.wait_for(stream.recv(), 10))
        assert {call.op for call in served.client.calls} <= {"describe", "events", "frame"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
async def test_loopback_server_takes_changes(engine: ScriptedEngine, host: str) -> None:
    async with (
        serve(engine.handle, host=host) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        answer = await http.patch("/vtoken/v1/config", json={})
        assert answer.json()["detail"] == "patch_config"  # the scripted engine has been asked


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Origin": "https://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": "http://127.0.0.1.evil.example"}, "Origin"),
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "Host"),
    ],
)
async def test_foreign_pages_and_rebound_names_are_refused(
    engine: ScriptedEngine, headers: dict[str, str], field: str
) -> None:
    async with (
        serve(engine.handle) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        for method in ("GET", "POST"):
            answer = await http.request(method, "/vtoken/v1/undo", headers=headers)
            assert answer.status_code == 403
            assert answer.json()["field"] == field
        if "Origin" in headers and "Host" not in headers:
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(served.stream_url, additional_headers=headers)
            assert refused.value.response.status_code == 403


async def test_pages_of_the_same_host_are_served(engine: ScriptedEngine) -> None:
    async with (
        serve(engine.handle) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        for origin in (served.url, "http://localhost:3000", "http://[::1]:1"):
            answer = await http.get("/vtoken/v1/events", headers={"Origin": origin})
            assert answer.status_code == 200
