"""A server with several API processes: the first answers, and clients cannot tell which they reach.

`tests/vllm/test_data_parallel.py` has a real server with two processes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import websockets
from websockets.protocol import State

from tests.support.core.live import LiveEngine
from tests.support.routes import CONTROL, READ, bearer, token_files
from tests.support.served_core import several
from tests.support.serving import Served
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken_api.forwarding import FORWARDED, Forwarded
from vtoken_api.settings import SHARED_FOLDER, shared_folder

BASE = "/vtoken/v1"
ANA = {"X-VToken-Actor": "ana"}


@contextlib.asynccontextmanager
async def clients_of(served: Served) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client of every process, the first one's first."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url + BASE, timeout=LIMIT_S))
            for url in urls(served)
        ]


def urls(served: Served) -> list[str]:
    return [served.url, *(other.url for other in served.others)]


def stream_url(url: str) -> str:
    return url.replace("http://", "ws://") + BASE + "/stream"


@pytest.fixture
async def three() -> AsyncIterator[tuple[Served, LiveEngine]]:
    """One engine behind three processes."""
    async with several(1, processes=3) as (served, (core,)):
        yield served, core


async def document(answer: httpx.Response, kind: Any) -> Any:
    assert answer.is_success, answer.text
    return msgspec.json.decode(answer.content, type=kind)


async def test_any_process_answers_any_call_alike(three: tuple[Served, LiveEngine]) -> None:
    served, core = three
    async with clients_of(served) as clients:
        # A change that one makes is seen by all, and is its client's.
        for number, http in enumerate(clients, 1):
            changed = await http.patch("/config", json={"theta_f": number / 10}, headers=ANA)
            result = await document(changed, wire.PatchResult)
            for other in clients:
                config = await document(await other.get("/config"), wire.ConfigDocument)
                assert (config.revision, config.desired.theta_f) == (result.revision, number / 10)
        pages = [await document(await http.get("/audit"), wire.AuditPage) for http in clients]
        assert [entry.actor for entry in pages[0].entries] == ["ana@127.0.0.1"] * 3
        assert pages == pages[:1] * 3
        # An id names one change, wherever it is sent.
        named = {"json": {"theta_f": 0.8}, "headers": {"X-VToken-Change": "change-0001"}}
        codes = [(await http.patch("/config", **named)).status_code for http in clients]
        assert codes == [200, 409, 409]
        # So is what is refused.
        for method, path, options in BAD:
            refusals = [await http.request(method, path, **options) for http in clients]
            assert refusals[0].status_code >= 400
            assert [answer.content for answer in refusals] == [refusals[0].content] * 3, path
            heads = [_head(answer) for answer in refusals]
            assert heads == [heads[0]] * 3
        # A name of a request may have a slash.
        core.admit("chatcmpl-a/tokens-0a1b2c3d", 20)
        for http in clients:
            found = await document(await http.get("/requests/a%2Ftokens"), wire.RequestDetail)
            assert found.id == "chatcmpl-a/tokens-0a1b2c3d"
        # And what is long, or depends on headers.
        octets = {"Accept": "application/octet-stream"}
        blocks = [await http.get("/blocks", headers=octets) for http in clients]
        assert {answer.headers["content-type"] for answer in blocks} == {"application/octet-stream"}
        assert {answer.content for answer in blocks} == {blocks[0].content}


async def test_no_client_speaks_for_another(three: tuple[Served, LiveEngine]) -> None:
    """A process drops the header in which processes tell each other whose a call is."""
    claimed = Forwarded("/vtoken/v1/config", client=("10.0.0.1", 1))
    headers = {FORWARDED.decode(): base64.b64encode(msgspec.msgpack.encode(claimed)).decode()}
    async with clients_of(three[0]) as clients:
        for http in clients:
            assert (await http.post("/sync", headers=headers)).status_code == 409
            answer = await http.patch("/config", json={"theta_f": 0.5}, headers=headers)
            assert answer.is_success
        page = await document(await clients[0].get("/audit"), wire.AuditPage)
        assert {entry.actor for entry in page.entries} == {"127.0.0.1"}


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/nowhere", {}),
    ("DELETE", "/config", {}),
    ("GET", "/status?token=secret", {}),
    ("GET", "/status?engine=7", {}),
    ("GET", "/requests/%2e%2e%2fno%20such", {}),
    ("PATCH", "/config", {"json": {"theta_f": 7}}),
    ("PATCH", "/config", {"content": b"\xff\x00"}),
    ("PATCH", "/config", {"content": b"x" * 70_000}),
    ("PATCH", "/config", {"json": {"theta_f": 0.2}, "headers": {"If-Match": '"999"'}}),
    ("PATCH", "/config", {"json": {"theta_f": 0.2}, "headers": {"X-VToken-Change": "?"}}),
    ("PATCH", "/config", {"json": {"theta_f": 0.2}, "headers": {"Origin": "http://evil.example"}}),
    ("POST", "/confirm", {}),
    ("POST", "/compactions", {"json": {"batch_size": -1}}),
    ("GET", "/status", {"headers": {"Host": "evil.example"}}),
    ("GET", "/requests/r0/text", {}),
]


def _head(answer: httpx.Response) -> tuple[int, dict[str, str]]:
    headers = {name: answer.headers[name] for name in answer.headers if name != "date"}
    return answer.status_code, headers


async def test_tokens_and_limits_hold_in_all_processes_together(tmp_path: Path) -> None:
    files = token_files(tmp_path, read=True, control=True)
    async with (
        several(1, processes=2, **files) as (served, _),
        clients_of(served) as clients,
    ):
        body = {"theta_f": 0.4}
        for http, url in zip(clients, urls(served), strict=True):
            assert (await http.get("/status")).status_code == 401
            assert (await http.get("/status", headers=bearer(READ))).status_code == 200
            refused = await http.patch("/config", json=body, headers=bearer(READ))
            assert refused.status_code == 403
            made = await http.patch("/config", json=body, headers=bearer(CONTROL))
            assert made.status_code == 200
            headers = {"Authorization": "Bearer wrong"}
            with pytest.raises(websockets.InvalidStatus) as error:
                await websockets.connect(stream_url(url), additional_headers=headers)
            assert error.value.response.status_code == 401
            assert "www-authenticate" in error.value.response.headers
            async with websockets.connect(stream_url(url)) as stream:
                await stream.send('{"type": "auth", "token": "' + READ + '"}')
                assert isinstance(await message(stream), wire.Hello)
            async with websockets.connect(stream_url(url)) as stream:
                await stream.send('{"type": "auth", "token": "wrong"}')
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await stream.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4401
        # The buckets are common: a call for recordings costs 20 reads of 400, and 100 a second.
        started = time.monotonic()
        calls = [clients[n % 2].get("/recording/x", headers=bearer(READ)) for n in range(160)]
        codes = [answer.status_code for answer in await asyncio.gather(*calls)]
        assert set(codes[0::2]) == set(codes[1::2]) == {404, 429}
        assert codes.count(404) <= (400 + 100 * (time.monotonic() - started)) / 20


async def test_metrics_are_the_same_from_every_process(three: tuple[Served, LiveEngine]) -> None:
    served, _ = three
    await until(lambda: served.engine.flight.recording, "not recording")  # it says so in a metric
    async with clients_of(served) as clients:

        async def ours(http: httpx.AsyncClient, url: str) -> list[str]:
            page = (await http.get(url + "/metrics")).text.splitlines()
            return [line for line in page if "vtoken_age_seconds" not in line]

        pages = [await ours(http, url) for http, url in zip(clients, urls(served), strict=True)]
        assert pages == pages[:1] * 3
        assert any(line.startswith("vllm:vtoken_up{") for line in pages[0])


async def test_stream_of_any_process_is_that_of_the_first(
    three: tuple[Served, LiveEngine],
) -> None:
    served, core = three
    hub = served.engine.hub
    async with contextlib.AsyncExitStack() as streams:
        opened = [
            await streams.enter_async_context(websockets.connect(stream_url(url) + query))
            for url in urls(served)
            for query in ("?topics=events", "?topics=events&format=msgpack")
        ]
        assert hub.num_clients == len(opened)
        for stream in opened:
            assert isinstance(await message(stream), wire.Hello)
            assert isinstance(await message(stream), wire.Snapshot)
        core.call("patch_config", patch={"theta_f": 0.5})
        for stream in opened:
            found = await message(stream)
            while not isinstance(found, wire.EventMessage):
                found = await message(stream)
            assert found.event.kind == "config"
    await until(lambda: hub.num_clients == 0, "a client that has left is counted")


async def message(stream: websockets.ClientConnection) -> wire.Message:
    received = await stream.recv()
    codec: Any = msgspec.json if isinstance(received, str) else msgspec.msgpack
    found: wire.Message = codec.decode(received, type=wire.StreamMessage)
    return found


async def test_client_is_told_that_the_first_process_does_not_answer() -> None:
    async with several(1, processes=2) as (served, _), clients_of(served) as (_, http):
        (other,) = served.others
        stream = await websockets.connect(stream_url(other.url))
        await message(stream)
        await served.stop_listening()
        await until(lambda: stream.state is State.CLOSED, "the stream goes on")
        answer = await http.get("/status")
        problem = await refused(answer)
        assert (answer.status_code, problem.title) == (503, "No answer")
        assert answer.headers["retry-after"] == "1"
        with pytest.raises(websockets.InvalidStatus) as error:
            await websockets.connect(stream_url(other.url))
        assert error.value.response.status_code == 503
        page = await http.get(other.url + "/metrics")
        assert (page.status_code, page.text) == (200, "")


async def refused(answer: httpx.Response) -> wire.Problem:
    return msgspec.json.decode(answer.content, type=wire.Problem)


async def test_session_is_ended_by_the_process_that_serves_its_client(
    three: tuple[Served, LiveEngine],
) -> None:
    served, core = three
    data = {"detail": "ended", "request_id": "session-1"}
    clients = [served.client, *(other.client for other in served.others)]

    def all_abort() -> bool:
        core.runtime.events.add(core.runtime.step + 1, "server", "session ended", data)
        core.publish()  # again, as a process that has just started does not follow yet
        return all(client.aborted for client in clients)

    await until(all_abort, "not aborted")
    assert all({*client.aborted} == {"session-1"} for client in clients)


def test_a_process_without_the_common_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_FOLDER, raising=False)
    with pytest.raises(ValueError, match="VTOKEN_API_FOLDER"):
        shared_folder(Namespace(api_server_count=2))
    assert shared_folder(Namespace(api_server_count=1)) is None
