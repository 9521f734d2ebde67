"""A real server with three API processes (`--api-server-count 3`) under chat traffic.

`make test-models` runs this file. In the suite, `test_data_parallel.py` has a real server with two
processes, and `tests/api/test_processes.py` three without vLLM. The last test ends a process, so
the server with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.demo.server import Server, any_free_port

ALL = bool(os.environ.get("VTOKEN_ALL_MODELS"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not ALL, reason="four starts of vLLM; `make test-models` runs it"),
]

NUM_PROCESSES, NUM_CHATS = 3, 6
ONE_CONNECTION = httpx.Limits(max_connections=1, keepalive_expiry=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api-processes")


@pytest.fixture(scope="module")
def server(demo_model: Path, folder: Path) -> Iterator[Server]:
    arguments = [
        "--served-model-name=demo",
        f"--api-server-count={NUM_PROCESSES}",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=1024",
        "--block-size=16",
        "--kv-cache-memory-bytes=16777216",
        "--vtoken-policy=streaming_llm",
        "--vtoken-budget-tokens=48",
        "--vtoken-evict-when=always",
        f"--vtoken-state-dir={folder / 'state'}",
    ]
    with Server(
        str(demo_model),
        port=any_free_port(),
        arguments=arguments,
        log=folder / "server.log",
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # a client stays with its process
        },
        startup_timeout_s=480,
    ) as running:
        yield running


def process_of(server: Server, answer: httpx.Response) -> int:
    """The id of the process at the other end of the answer's connection."""
    _, port = answer.extensions["network_stream"].get_extra_info("client_addr")
    for child in psutil.Process(server.pid).children(recursive=True):
        for connection in child.net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                return child.pid
    raise AssertionError(f"nobody has the connection from port {port}")


def first_of(server: Server) -> int:
    """The id of API process 0, which listens to the others."""
    for child in psutil.Process(server.pid).children(recursive=True):
        for connection in child.net_connections("unix"):
            if re.search(r"/vtoken-api-[^/]*/api$", str(connection.laddr)):
                return child.pid
    raise AssertionError("no process listens to the others")


@pytest.fixture
async def clients(server: Server) -> AsyncIterator[dict[int, httpx.AsyncClient]]:
    """A client of every API process, by the id of the process."""
    opened: list[httpx.AsyncClient] = []
    found: dict[int, httpx.AsyncClient] = {}

    async def one_more() -> bool:
        client = httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=ONE_CONNECTION)
        opened.append(client)
        answer = await client.get("/vtoken/v1/config")
        found.setdefault(process_of(server, answer), client)
        return len(found) == NUM_PROCESSES

    try:
        await until(one_more, "not every API process takes connections", limit_s=240, every_s=0.2)
        yield found
    finally:
        for client in opened:
            await client.aclose()


class Chats:
    """NUM_CHATS clients that chat until the context exits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = False
        self.codes: list[int] = []

    async def __aenter__(self) -> Chats:
        self._tasks = [asyncio.create_task(self._chat(n)) for n in range(NUM_CHATS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _chat(self, number: int) -> None:
        messages = [{"role": "user", "content": f"Question {number}: " + "why? " * 20}]
        body = {"model": "demo", "messages": messages, "max_tokens": 80, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT_S) as client:
            while not self._stop:
                answer = await client.post("/v1/chat/completions", json=body)
                self.codes.append(answer.status_code)


async def call(client: httpx.AsyncClient, kind: Any, method: str, path: str, **more: Any) -> Any:
    answer = await client.request(method, f"/vtoken/v1{path}", **more)
    assert answer.is_success, answer.text
    return msgspec.json.decode(answer.content, type=kind)


async def test_changes_compaction_and_trial_under_traffic_are_alike_in_all_processes(
    server: Server, clients: dict[int, httpx.AsyncClient]
) -> None:
    one, two, three = clients.values()
    async with Chats(server.url) as chats:
        first = await call(one, wire.PatchResult, "PATCH", "/config", json={"theta_f": 0.5})
        for client in (two, three):
            config = await call(client, wire.ConfigDocument, "GET", "/config")
            assert (config.revision, config.desired.theta_f) == (first.revision, 0.5)
        started = await call(two, wire.Operation, "POST", "/compactions", json={})

        async def ended() -> bool:
            found = await call(three, wire.Operation, "GET", f"/operations/{started.id}")
            return bool(found.state == "done")

        await until(ended, "the compaction does not end")
        terms = '?confirm_within_s=300&guards=[{"metric":"preemptions","above":1000}]'
        trial = await call(
            three, wire.PatchResult, "PATCH", f"/config{terms}", json={"theta_f": 0.4}
        )
        assert trial.trial is not None
        await call(one, wire.PatchResult, "POST", "/confirm")
        named = {"X-VToken-Change": "the-same-change"}
        patch = {"json": {"theta_f": 0.3}, "headers": named}
        last = await call(two, wire.PatchResult, "PATCH", "/config", **patch)
        retried = await three.patch("/vtoken/v1/config", **patch)
        assert retried.status_code == 409
        outcome = await call(one, wire.Change, "GET", "/changes/the-same-change")
        assert outcome.state == "applied"
        assert outcome.result.revision == last.revision
        pages = [await call(c, wire.AuditPage, "GET", "/audit") for c in clients.values()]
        assert pages == pages[:1] * NUM_PROCESSES
        assert [entry.action for entry in pages[0].entries] == [
            "config", "compact", "trial", "confirm", "config",
        ]  # fmt: skip
        revisions = [entry.revision for entry in pages[0].entries]
        assert revisions == sorted(revisions)
        await until(lambda: len(chats.codes) > 2 * NUM_CHATS, "no chats")
    assert set(chats.codes) == {200}
    status = await call(one, wire.Status, "GET", "/status")
    assert status.tokens.evicted > 0
    assert all(part.ok for part in status.health)


async def test_metrics_of_any_process_are_those_of_all(
    clients: dict[int, httpx.AsyncClient],
) -> None:
    async def pages() -> list[dict[str, str]]:
        texts = [(await client.get("/metrics")).text for client in clients.values()]
        found = []
        for text in texts:
            pairs = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:")]
            assert len(dict(pairs)) == len(pairs)  # each series once
            found.append(dict(pairs))
        return found

    labels = '{engine="0",model_name="demo"}'
    found = await pages()
    series = [{name for name in page if "vtoken_" in name} for page in found]
    assert series == series[:1] * NUM_PROCESSES
    for name in ("vllm:vtoken_generated_tokens_total", "vllm:generation_tokens_total"):
        values = {page[name + labels] for page in found}
        assert len(values) == 1
        assert float(values.pop()) > 0
    assert {page[f"vllm:vtoken_server_recording{labels}"] for page in found} == {"1.0"}


async def test_no_answered_change_is_lost_when_the_first_process_is_killed(
    server: Server, clients: dict[int, httpx.AsyncClient], folder: Path
) -> None:
    """vLLM ends the server when an API process dies."""
    first_process = first_of(server)
    answered: list[int] = []

    async def change(client: httpx.AsyncClient, first: int) -> None:
        for number in range(first, 1000, 2):
            try:
                answer = await client.patch("/vtoken/v1/config", json={"theta_f": number / 1000})
            except httpx.HTTPError:
                return
            if answer.status_code == 200:
                answered.append(answer.json()["revision"])
            await asyncio.sleep(0.12)  # within the limits

    async with asyncio.TaskGroup() as group:
        others = [client for pid, client in clients.items() if pid != first_process]
        for first, client in enumerate(others):
            group.create_task(change(client, first))
        await until(lambda: len(answered) > 4, "no changes")
        os.kill(first_process, signal.SIGKILL)
    await until(lambda: not psutil.pid_exists(server.pid) or _is_zombie(server), "it serves on")
    lines = (folder / "state" / "audit.jsonl").read_bytes().splitlines()
    entered = [json.loads(line).get("revision") for line in lines]
    made = [revision for revision in entered if revision in set(answered)]
    assert made == sorted(answered)


def _is_zombie(server: Server) -> bool:
    return psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
