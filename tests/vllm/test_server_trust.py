"""A real `vtoken serve` with token files, under misuse: access control, secrets, metrics, bad
clients, a killed engine. All tests share one server; the last one kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import websockets
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from tests.support import reference
from tests.support.random_calls import call_at_random, described_operations
from tests.support.routes import bearer, check_every_route
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.demo.server import Server, any_free_port
from vtoken_api.metrics import METRICS, PREFIX

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

READ, CONTROL = "the-read-token-0123", "the-control-token-0123"
NUM_CLIENTS = 50
NUM_COMPLETIONS = 6
ENDS = ("", "_total", "_bucket", "_sum", "_count")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trust")


@pytest.fixture(scope="module")
def server(demo_model: Path, folder: Path) -> Iterator[Server]:
    for name, token in (("read", READ), ("control", CONTROL)):
        (folder / name).write_text(token)
        (folder / name).chmod(0o600)
    arguments = [
        "--served-model-name=demo",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=2048",
        "--block-size=16",
        "--kv-cache-memory-bytes=16777216",
        "--vtoken-policy=streaming_llm",
        "--vtoken-budget-tokens=96",
        "--vtoken-evict-when=always",
        "--vtoken-interval-tokens=8",
        f"--vtoken-read-token-file={folder / 'read'}",
        f"--vtoken-control-token-file={folder / 'control'}",
        f"--vtoken-state-dir={folder / 'state'}",
    ]
    with Server(
        str(demo_model),
        port=any_free_port(),
        arguments=arguments,
        log=folder / "server.log",
        environment={"HF_HUB_OFFLINE": "1"},
        startup_timeout_s=240,
        headers=bearer(READ),
    ) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


def stream_url(server: Server, query: str = "") -> str:
    return server.url.replace("http", "ws") + "/vtoken/v1/stream" + query


async def complete(http: httpx.AsyncClient, number: int) -> None:
    """One completion of 120 tokens; vLLM's own routes need no token here."""
    body = {
        "model": "demo",
        "prompt": reference.random_prompt(150 + number, number),
        "max_tokens": 120,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 120


async def test_every_route_and_the_stream_are_guarded_on_vllms_own_server(
    http: httpx.AsyncClient,
) -> None:
    assert await check_every_route(http, READ) >= 16
    described = (await http.get("/openapi.json")).json()["paths"]
    assert "/vtoken/v1/status" in described


async def test_control_token_changes_and_is_audited_on_disk(
    http: httpx.AsyncClient, folder: Path
) -> None:
    patch = {"theta_f": 0.125}
    changed = await http.patch("/vtoken/v1/config", json=patch, headers=bearer(CONTROL))
    assert changed.status_code == 200, changed.text
    file = folder / "state" / "audit.jsonl"
    entry = msgspec.json.decode(file.read_bytes().splitlines()[-1], type=wire.AuditEntry)
    assert entry.changes["theta_f"][1] == 0.125
    assert {path.stat().st_mode & 0o077 for path in file.parent.iterdir()} == {0}


def processes_of(server: Server) -> list[Path]:
    """The server's process and its descendants: they share a session."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == server.pid:
                    found.append(path)
    return found


async def test_no_token_shows_in_log_command_lines_or_environments(
    server: Server, http: httpx.AsyncClient
) -> None:
    for token in (READ, CONTROL):
        assert (await http.get("/vtoken/v1/status", headers=bearer(token))).status_code == 200
        refused = await http.get("/vtoken/v1/status", params={"token": token})
        assert refused.status_code == 401
        with pytest.raises(websockets.InvalidStatus):
            await connect(stream_url(server, f"?token={token}"))
        broken = await http.request(
            "PATCH", "/vtoken/v1/config", content=b'{"x":', headers=bearer(token)
        )
        assert broken.status_code in (403, 415)
    log = server.log.read_text()
    assert "/vtoken/v1/status?refused" in log  # the access log is on, and shows this much
    found = processes_of(server)
    assert len(found) >= 2  # API server and engine
    shown = log.encode()
    for process in found:
        for name in ("cmdline", "environ"):
            shown += (process / name).read_bytes()
    for token in (READ, CONTROL):
        assert token.encode() not in shown


async def test_metrics_of_the_real_server_are_those_that_docs_and_dashboard_name(
    http: httpx.AsyncClient,
) -> None:
    await asyncio.gather(*[complete(http, n) for n in range(NUM_COMPLETIONS)])
    await asyncio.sleep(1.1)  # a scrape may show what was so a second ago
    page = await http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    samples = {s.name for family in families.values() for s in family.samples}
    sometimes = {"shadow_victims_tokens", "shadow_agreed_tokens", "deferrals"}
    sometimes |= {metric.name for metric in METRICS if metric.name.startswith("canary_")}
    sometimes |= {"short_blocks", "givers", "givable_tokens", "spared_tokens"}  # under pressure
    sometimes |= {"given_tokens", "preemptions_above_floor", "kept_share"}
    sometimes |= {"budget_tokens", "budget_ratio", "budget_floor_tokens"}  # what is in force
    for metric in METRICS:
        family = families[PREFIX + metric.name]
        assert family.type == metric.kind
        assert metric.name in sometimes or family.samples, metric.name
        assert {s.labels["model_name"] for s in family.samples} <= {"demo"}
        assert {s.labels["engine"] for s in family.samples} <= {"0"}
    evicted = families[PREFIX + "evicted_tokens"].samples[0].value
    assert evicted > 0
    generated = families[PREFIX + "generated_tokens"].samples[0].value
    assert generated == families["vllm:generation_tokens"].samples[0].value
    dashboard = (ROOT / "docs/grafana/vtoken.json").read_text()
    named = set(re.findall(r"vllm:\w+", dashboard))
    assert named - samples <= {PREFIX + name + end for name in sometimes for end in ENDS}


def test_random_calls_are_answered_as_the_description_says(server: Server) -> None:
    operations = described_operations(server.url)
    assert len(operations) >= 17
    for name, operation in operations.items():
        if name != "vtoken_recording":  # a large file each time
            call_at_random(operation, server.url, 3, headers=bearer(CONTROL))
    lines = server.log.read_text().splitlines()
    assert [line for line in lines if "vtoken:" in line and "ERROR" in line] == []


class Listener:
    """A well-behaved client that checks what it is sent: no gap in `seq`, none in the events."""

    def __init__(self) -> None:
        self.messages = 0
        self.events = 0
        self.wrong: list[str] = []

    async def run(self, url: str) -> None:
        seq, event_seq = 0, None
        async with connect(url, additional_headers=bearer(READ), max_size=None) as stream:
            async for data in stream:
                message: Any = msgspec.json.decode(data, type=wire.StreamMessage)
                self.messages += 1
                if message.seq != seq + 1:
                    self.wrong.append(f"seq {message.seq} after {seq}")
                seq = message.seq
                if isinstance(message, wire.EventMessage):
                    self.events += 1
                    if event_seq is not None and message.event.seq != event_seq + 1:
                        self.wrong.append(f"event {message.event.seq} after {event_seq}")
                    event_seq = message.event.seq
                elif isinstance(message, wire.Dropped):
                    self.wrong.append(f"{message.n} dropped")


@contextlib.asynccontextmanager
async def raw_stream(server: Server) -> AsyncIterator[socket.socket]:
    """A handshake by hand, with a tiny receive buffer; nothing is read after it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        lines = [
            "GET /vtoken/v1/stream?fps=30 HTTP/1.1",
            f"Host: {host}:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            f"Authorization: Bearer {READ}",
        ]
        raw.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        raw.setblocking(False)
        head = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 64), LIMIT_S)
        assert b"101" in head
        yield raw


async def test_stalled_and_killed_clients_touch_neither_the_engine_nor_fifty_others(
    server: Server, http: httpx.AsyncClient
) -> None:
    listeners = [Listener() for _ in range(NUM_CLIENTS)]
    tasks = [asyncio.create_task(listener.run(stream_url(server))) for listener in listeners]
    async with raw_stream(server), raw_stream(server) as killed:
        while not all(listener.messages >= 2 for listener in listeners):
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in tasks)
        running = asyncio.gather(*[complete(http, n) for n in range(NUM_COMPLETIONS)])
        await asyncio.sleep(0.5)
        killed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        killed.close()  # RST
        await running
        status = (await http.get("/vtoken/v1/status", headers=bearer(READ))).json()
        seen = {listener.events for listener in listeners}
        await until(
            lambda: min(listener.events for listener in listeners) >= max(seen),
            "not every client has the events that one had",
        )
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
    assert [listener.wrong for listener in listeners if listener.wrong] == []
    assert max(seen) > 0
    assert status["invariants"]["violations"] == 0

    async def disconnected() -> bool:
        return await clients(http) <= 1

    await until(disconnected, "disconnected clients are still counted", every_s=0.2)


async def clients(http: httpx.AsyncClient) -> float:
    page = (await http.get("/metrics")).text
    name = PREFIX + "server_stream_clients"
    (line,) = [line for line in page.splitlines() if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


async def test_a_killed_engine_is_reported_to_every_client_and_no_stale_state_is_served(
    server: Server, http: httpx.AsyncClient
) -> None:
    engines = [
        int(process.name)
        for process in processes_of(server)
        if b"EngineCore" in (process / "cmdline").read_bytes()
    ]
    assert len(engines) == 1
    async with connect(stream_url(server), additional_headers=bearer(READ)) as stream:
        hello = json.loads(await stream.recv())
        assert hello["type"] == "hello"
        assert not hello["can_control"]
        os.kill(engines[0], signal.SIGKILL)
        await asyncio.wait_for(stream.wait_closed(), LIMIT_S)
        assert stream.close_code in (
            4503,
            1012,
        )  # from vToken, or from a server that is shutting down
    answers = []
    with contextlib.suppress(httpx.TransportError):
        while len(answers) < 100:
            answers.append(await http.get("/vtoken/v1/status", headers=bearer(READ)))
            await asyncio.sleep(0.1)
    assert {answer.status_code for answer in answers} <= {503}
    assert all(answer.json()["title"] == "Engine unavailable" for answer in answers)
