"""A real server with two engines (`--data-parallel-size 2`): exact on both, changed together.

As with `vllm serve`, it has two API processes.

The last test ends an engine, so the server with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import websockets

from tests.support import data_parallel
from tests.support.data_parallel import assert_both_engines_are_exact, complete, fleet
from tests.support.routes import told_that_the_engine_ended
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.demo.server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two-engines")
    with data_parallel.server(demo_model, folder, ["--data-parallel-size=2"]) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


async def test_both_engines_compute_what_the_reference_does(
    http: httpx.AsyncClient, hf_model: Any
) -> None:
    await assert_both_engines_are_exact(http, hf_model)


async def test_a_change_under_load_is_made_on_both_and_audited_once(
    http: httpx.AsyncClient,
) -> None:
    running = [asyncio.create_task(complete(http, rank, 7 + rank)) for rank in (0, 1)]
    before = await fleet(http)
    answer = await http.patch("/vtoken/v1/config", json={"theta_f": 0.5})
    result = msgspec.json.decode(answer.content, type=wire.PatchResult)
    assert [part.engine for part in result.engines] == [0, 1]
    started = await http.post("/vtoken/v1/compactions", json={})
    assert started.status_code == 202
    await asyncio.gather(*running)

    async def ended() -> bool:
        found = (await http.get(started.headers["location"])).content
        return msgspec.json.decode(found, type=wire.Operation).state == "done"

    await until(ended, "the compaction does not end")
    after = await fleet(http)
    assert after.ok
    assert after.revision == before.revision + 1
    page = msgspec.json.decode((await http.get("/vtoken/v1/audit")).content, type=wire.AuditPage)
    assert [(e.action, e.engine) for e in page.entries] == [("config", None), ("compact", None)]


async def test_any_api_process_answers_alike(server: Server) -> None:
    """Clients that stay connected, so that vLLM gives the next one to the other process."""
    found: dict[int, tuple[bytes, set[str]]] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def both_asked() -> bool:
            client = httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S)
            http = await stack.enter_async_context(client)
            audit = await http.get("/vtoken/v1/audit")
            assert audit.status_code == 200, audit.text
            page = (await http.get("/metrics")).text.splitlines()
            series = [line.rpartition(" ")[0] for line in page if line.startswith("vllm:vtoken_")]
            assert len(set(series)) == len(series)
            names = {name.partition("{")[0] for name in series}
            found[process_of(server, audit)] = audit.content, names
            return len(found) == 2

        await until(both_asked, "one process takes all connections")
    first, second = found.values()
    assert first == second
    assert "vllm:vtoken_up" in first[1]
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            stream = await stack.enter_async_context(websockets.connect(stream_url(server)))
            hello = msgspec.json.decode(await stream.recv(), type=wire.StreamMessage)
            assert isinstance(hello, wire.Hello)


def stream_url(server: Server) -> str:
    return server.url.replace("http://", "ws://") + "/vtoken/v1/stream?topics=events"


def process_of(server: Server, answer: httpx.Response) -> int:
    """The id of the process at the other end of the answer's connection."""
    _, port = answer.extensions["network_stream"].get_extra_info("client_addr")
    for child in psutil.Process(server.pid).children(recursive=True):
        for connection in child.net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                return child.pid
    raise AssertionError(f"nobody has the connection from port {port}")


async def test_one_engine_drifts_and_is_given_the_common_configuration(
    http: httpx.AsyncClient,
) -> None:
    await http.patch("/vtoken/v1/config?engine=1", json={"theta_f": 0.75})
    found = await fleet(http)
    assert not found.ok
    assert "theta_f" in found.sentence
    answer = await http.post("/vtoken/v1/sync?engine=0")
    assert answer.status_code == 200, answer.text
    found = await fleet(http)
    assert found.ok, found.sentence


async def test_guards_on_one_engine_decide_whether_the_other_follows(
    http: httpx.AsyncClient,
) -> None:
    """Under traffic on both: guards that hold, then one that is crossed."""
    stop = asyncio.Event()

    async def chat(rank: int) -> None:
        while not stop.is_set():
            await complete(http, rank, rank)

    async def thetas() -> list[float | None]:
        rows = (await fleet(http)).engines
        return [row.status and row.status.fragmentation.theta_f for row in rows]

    async def entered() -> list[tuple[str, str, int | None]]:
        content = (await http.get("/vtoken/v1/audit")).content
        entries = msgspec.json.decode(content, type=wire.AuditPage).entries
        return [(entry.action, entry.actor, entry.engine) for entry in entries[known:]]

    async def rolled_out() -> bool:
        return (await entered())[1:] == [
            ("keep", "guard", 1),
            ("rollout", "guard of engine 1", 0),
        ]

    async def reverted() -> bool:
        return (await entered())[4:] == [("revert", "guard", 1)]

    known = 0
    known = len(await entered())
    chats = [asyncio.create_task(chat(rank)) for rank in (0, 1)]

    async def try_first(theta_f: float, p95_s: float, for_s: float) -> httpx.Response:
        guard = {"metric": "latency_seconds{kind=inter_token,quantile=0.95}", "above": p95_s}
        terms = {"canary_engine": 1, "guard_for_s": for_s, "guards": json.dumps([guard])}
        return await http.patch("/vtoken/v1/config", json={"theta_f": theta_f}, params=terms)

    try:
        answer = await try_first(0.6, 3600, 2)
        assert answer.status_code == 200, answer.text
        result = msgspec.json.decode(answer.content, type=wire.PatchResult)
        assert result.engine == 1
        assert result.trial is not None
        assert result.trial.followers == [0]
        await until(rolled_out, "engine 0 does not follow", every_s=0.1)
        assert await thetas() == [0.6, 0.6]
        answer = await try_first(0.9, 1e-6, 600)
        assert answer.status_code == 200, answer.text
        await until(reverted, "engine 1 keeps the change", every_s=0.1)
        assert await thetas() == [0.6, 0.6]
    finally:
        stop.set()
        await asyncio.gather(*chats)
    assert (await fleet(http)).ok


async def test_an_engine_that_dies_is_told_before_the_server_ends(
    server: Server, http: httpx.AsyncClient
) -> None:
    """vLLM ends a server when one of its engines dies; nothing hangs until then."""
    children = psutil.Process(server.pid).children(recursive=True)
    (engine,) = [child for child in children if "EngineCore_DP1" in " ".join(child.cmdline())]

    async def told() -> bool:
        try:
            answer = await http.get("/vtoken/v1/engines")
        except httpx.HTTPError:
            return True
        if answer.is_server_error:
            return True
        found = msgspec.json.decode(answer.content, type=wire.Fleet)
        return all(row.problem for row in found.engines)

    async with websockets.connect(stream_url(server)) as stream:
        os.kill(engine.pid, signal.SIGKILL)
        await until(told, "an engine that died seems to answer")
        await told_that_the_engine_ended(stream)
