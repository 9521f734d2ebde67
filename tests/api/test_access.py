"""Access control: tokens and scopes, read-only servers, pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import product
from pathlib import Path

import httpx
import pytest
import websockets

from tests.support.routes import (
    CONTROL,
    READ,
    bearer,
    check_every_route,
    hello_of,
    stream_status,
    token_file,
    token_files,
)
from tests.support.scripted import ScriptedEngine
from tests.support.serving import serve
from tests.support.waiting import LIMIT_S
from vtoken_api.stream import endpoint

API_KEY = "the-api-key-0123"
ROOT = "/vtoken/v1"
CHANGES = (("PATCH", "config"), ("POST", "undo"), ("POST", "compactions"))


# The rights of each caller: "-" none (401), "r" read, "c" control, "." if the server has no such
# token. The callers are anonymous, API key, read token, control token. As in docs/security.md.
#        local: loopback or Unix socket     beyond: any other address
MATRIX = {
    # (API key, read token, control token)
    (False, False, False): {"local": "c...", "beyond": "r..."},
    (True, False, False): {"local": "-c..", "beyond": "-r.."},
    (False, True, False): {"local": "-.r.", "beyond": "-.r."},
    (True, True, False): {"local": "-cr.", "beyond": "-rr."},
    (False, False, True): {"local": "r..c", "beyond": "-..c"},
    (True, False, True): {"local": "-r.c", "beyond": "-r.c"},
    (False, True, True): {"local": "-.rc", "beyond": "-.rc"},
    (True, True, True): {"local": "-rrc", "beyond": "-rrc"},
}


@pytest.mark.parametrize(("held", "where"), list(product(MATRIX, ("local", "beyond"))))
async def test_every_combination_of_tokens_grants_what_the_table_says(
    engine: ScriptedEngine, tmp_path: Path, held: tuple[bool, bool, bool], where: str
) -> None:
    has_key, has_read, has_control = held
    async with (
        serve(
            engine.handle,
            host="127.0.0.1" if where == "local" else "0.0.0.0",
            api_key=[API_KEY] if has_key else None,
            show_text=True,
            **token_files(tmp_path, read=has_read, control=has_control),
        ) as served,
        httpx.AsyncClient(base_url=served.url + ROOT) as http,
    ):
        callers = (None, API_KEY, READ, CONTROL)
        for token, may in zip(callers, MATRIX[held][where], strict=True):
            if may == ".":
                continue
            headers = bearer(token)
            reading = await http.get("/events", headers=headers)
            assert reading.status_code == (401 if may == "-" else 200), token
            for method, path in CHANGES:
                changing = await http.request(method, "/" + path, json={}, headers=headers)
                if may == "c":  # the scripted engine has been asked, and knows no such command
                    assert changing.json()["status"] in (404, 422), token
                    assert changing.json()["title"] != "Read-only"
                else:
                    assert changing.status_code == (401 if may == "-" else 403), token
            text = await http.get("/requests/a/text", headers=headers)
            if may == "c":  # as above
                assert text.json()["status"] in (404, 422), token
            else:
                assert text.status_code == (401 if may == "-" else 403), token
            if may == "-":
                assert await stream_status(served.stream_url, headers) == 401
                continue
            ways = [False, True] if token and served.service.auth.access.needs_token else [False]
            for first_message in ways:
                hello = await hello_of(served.stream_url, token, first_message=first_message)
                assert hello["can_control"] is (may == "c")
                assert bool(hello["read_only_reason"]) is (may != "c")
                assert hello["can_read_text"] is (may == "c")
        if any(held):
            unknown = await http.get("/events", headers=bearer("unknown-token-0123"))
            assert unknown.status_code == 401
            assert unknown.headers["WWW-Authenticate"] == "Bearer"
            assert await stream_status(served.stream_url, bearer("unknown-token-0123")) == 401
        changed = {"patch_config", "undo", "compact"} & {call.op for call in served.line.calls}
        assert bool(changed) is ("c" in MATRIX[held][where])


async def test_every_route_is_guarded_and_every_change_needs_the_control_token(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    files = token_files(tmp_path, read=True, control=True)
    async with (
        serve(engine.handle, **files) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        assert await check_every_route(http, READ) >= 16
        assert {call.op for call in served.line.calls} <= {"describe", "events", "frame"}


async def test_api_key_guards_unknown_paths_and_leaves_the_rest_of_the_server_alone(
    engine: ScriptedEngine,
) -> None:
    async with serve(engine.handle, api_key=[API_KEY]) as served:
        answer = await served.http.get("/vtoken/v1/nowhere")
        assert answer.status_code == 401
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert (await served.http.get("/v1/models")).status_code == 200


DEEP = '{"type": "auth", "token": "x", "more": ' + "[" * 2000 + "]" * 2000 + "}"


@pytest.mark.parametrize(
    "first", ['{"type": "auth", "token": "x"}', "hello", b"\xff", "x" * 5000, DEEP]
)
async def test_stream_refuses_any_first_message_but_the_token(
    engine: ScriptedEngine, first: str | bytes
) -> None:
    async with serve(engine.handle, api_key=[API_KEY]) as served:
        async with websockets.connect(served.stream_url) as stream:
            await stream.send(first)
            with pytest.raises(websockets.ConnectionClosedError):
                await asyncio.wait_for(stream.recv(), LIMIT_S)
            assert stream.close_code == 4401
        assert served.service.auth.refusals.counts[401] == 1


async def test_clients_that_authenticate_after_connecting_keep_the_bound_of_streams(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_CLIENTS", 3)
    async with (
        serve(engine.handle, api_key=[API_KEY]) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        streams = [
            await stack.enter_async_context(websockets.connect(served.stream_url)) for _ in range(5)
        ]
        codes = []
        for stream in streams:
            await stream.send(f'{{"type": "auth", "token": "{API_KEY}"}}')
            try:
                message = json.loads(await asyncio.wait_for(stream.recv(), LIMIT_S))
                codes.append(message["type"])
            except websockets.ConnectionClosedError:
                codes.append(str(stream.close_code))
        assert codes == ["hello", "hello", "hello", "4429", "4429"]
        assert served.engine.hub.num_clients == 3
        assert served.service.auth.refusals.counts == {429: 2}


async def test_connections_without_a_token_are_few_and_end_soon(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_UNAUTHENTICATED", 2)
    monkeypatch.setattr(endpoint, "AUTH_TIMEOUT_S", 0.3)
    async with (
        serve(engine.handle, api_key=[API_KEY]) as served,
        websockets.connect(served.stream_url) as first,
        websockets.connect(served.stream_url) as second,
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(served.stream_url)
        assert refused.value.response.status_code == 429
        assert "have not sent their token" in refused.value.response.body.decode()
        hello = await hello_of(served.stream_url, API_KEY)  # a token in the header is not affected
        assert hello["type"] == "hello"
        for silent in (first, second):
            with pytest.raises(websockets.ConnectionClosedError):
                await asyncio.wait_for(silent.recv(), LIMIT_S)
            assert silent.close_code == 4401
        assert (await hello_of(served.stream_url, API_KEY, first_message=True))["type"] == "hello"
        assert served.service.auth.refusals.counts == {429: 1, 401: 2}


@pytest.mark.parametrize("name", ["token", "api_key", "Authorization", "x"])
async def test_token_in_a_url_is_refused_even_where_none_is_needed(
    engine: ScriptedEngine, tmp_path: Path, name: str
) -> None:
    files = token_files(tmp_path, read=False, control=True)
    async with serve(engine.handle, **files) as served:
        answer = await served.http.get("/vtoken/v1/events", params={name: CONTROL})
        assert answer.status_code == 401
        assert "URL" in answer.json()["detail"]
        assert CONTROL not in answer.text
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"{served.stream_url}?{name}={CONTROL}")
        assert refused.value.response.status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", None, "192.0.2.1", "example.org"])
async def test_server_bound_to_more_than_loopback_is_read_only_and_says_so(
    engine: ScriptedEngine, host: str | None, server_log: pytest.LogCaptureFixture
) -> None:
    async with serve(engine.handle, host=host) as served:
        assert "read-only" in server_log.text
        hello = await hello_of(served.stream_url, None)
        assert "bound to more than loopback" in hello["read_only_reason"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
async def test_loopback_server_takes_changes(
    engine: ScriptedEngine, host: str, server_log: pytest.LogCaptureFixture
) -> None:
    async with serve(engine.handle, host=host) as served:
        answer = await served.http.patch("/vtoken/v1/config", json={})
        assert answer.json()["detail"] == "patch_config"  # the scripted engine has been asked
        assert "read-only" not in server_log.text


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Origin": "https://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": "http://127.0.0.1.evil.example"}, "Origin"),
        ({"Origin": "http://[::1"}, "Origin"),
        ({"Origin": "file://localhost"}, "Origin"),
        ({"Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site"),
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "Host"),
    ],
)
async def test_foreign_pages_and_rebound_names_are_refused(
    engine: ScriptedEngine, headers: dict[str, str], field: str
) -> None:
    async with serve(engine.handle) as served:
        for method in ("GET", "POST"):
            answer = await served.http.request(method, "/vtoken/v1/undo", headers=headers)
            assert answer.status_code == 403
            assert answer.json()["field"] == field
        if "Host" not in headers:
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(served.stream_url, additional_headers=headers)
            assert refused.value.response.status_code == 403


async def test_pages_of_the_same_host_are_served(engine: ScriptedEngine) -> None:
    async with serve(engine.handle) as served:
        for origin in (served.url, "http://localhost:3000", "http://[::1]:1"):
            answer = await served.http.get("/vtoken/v1/events", headers={"Origin": origin})
            assert answer.status_code == 200
        typed = await served.http.get("/vtoken/v1/events", headers={"Sec-Fetch-Site": "none"})
        assert typed.status_code == 200


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"two words-0123456789", "characters that a header cannot carry"),
        (b"two\nlines-0123456789", "characters that a header cannot carry"),
        (b"t\xc3\xb6ken-0123456789abc", "characters that a header cannot carry"),
        (b"short", "5 characters, allowed are 16"),
        (b"x" * 2000, "2000 characters"),
        (None, "cannot read the token file"),
    ],
)
async def test_bad_token_file_refuses_the_start_and_is_never_quoted(
    engine: ScriptedEngine, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Exception, match=said) as refused:
        async with serve(engine.handle, control_token_file=str(path)):
            pass
    assert str(path) in str(refused.value)
    for word in (content or b"").split():
        assert word.decode("latin-1") not in str(refused.value)


async def test_one_token_for_two_scopes_refuses_the_start(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = token_file(tmp_path, "both", READ)
    with pytest.raises(ValueError, match="must differ"):
        async with serve(engine.handle, read_token_file=file, control_token_file=file):
            pass


async def test_token_file_that_others_can_read_is_warned_about(
    engine: ScriptedEngine, tmp_path: Path, server_log: pytest.LogCaptureFixture
) -> None:
    file = token_file(tmp_path, "control", CONTROL)
    Path(file).chmod(0o644)
    async with serve(engine.handle, control_token_file=file):
        assert f"other users can read {file}" in server_log.text


async def test_refused_calls_are_counted_all_and_logged_seldom_without_what_was_shown(
    engine: ScriptedEngine, tmp_path: Path, server_log: pytest.LogCaptureFixture
) -> None:
    files = token_files(tmp_path, read=True, control=True)
    async with serve(engine.handle, **files) as served:
        for _ in range(20):
            await served.http.get("/vtoken/v1/status", headers=bearer("guess-0123456789"))
        await served.http.post("/vtoken/v1/undo", headers=bearer(READ))
        assert served.service.auth.refusals.counts == {401: 20, 403: 1}
        lines = {id(r): r.getMessage() for r in server_log.records if "refused" in r.getMessage()}
        assert len(lines) == 1
        assert "GET /vtoken/v1/status from 127.0.0.1: 401" in next(iter(lines.values()))
        for secret in ("guess", READ, CONTROL):
            assert secret not in server_log.text
        assert (await served.service.journal.entries(10)).entries == []


async def test_path_with_a_line_break_does_not_pass_by_the_guard(engine: ScriptedEngine) -> None:
    async with serve(engine.handle, api_key=[API_KEY]) as served:
        assert (await served.http.get("/vtoken/v1/requests/a%0Ab")).status_code == 401
