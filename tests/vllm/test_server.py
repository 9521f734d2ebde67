"""A real `vtoken serve` with token files, real HTTP clients, real websockets: live switching, bad
input, access control, secrets, metrics, bad clients. All tests share one server; the last one ends
its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import re
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
from tests.support.cli_harness import run
from tests.support.random_calls import call_at_random, described_operations
from tests.support.routes import (
    CONTROL,
    READ,
    bearer,
    check_every_route,
    token_files,
    told_that_the_engine_ended,
)
from tests.support.waiting import LIMIT_S, until
from vtoken import client, wire
from vtoken.client import AsyncClient, ProblemError
from vtoken.demo.server import Server, any_free_port
from vtoken.recording import Index, RecordingReader, scan
from vtoken_api.metrics import METRICS, PREFIX

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_STREAMS = 8
NUM_SWITCHES = 10
NUM_CLIENTS = 50
NUM_COMPLETIONS = 6
ENDS = ("", "_total", "_bucket", "_sum", "_count")
ROOT = Path(__file__).parents[2]
EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 96,
    "evict_when": "always",
    "interval_tokens": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(demo_model: Path, folder: Path) -> Iterator[Server]:
    files = token_files(folder, read=True, control=True)
    arguments = [
        "--served-model-name=demo",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=1024",
        "--block-size=32",
        "--kv-cache-memory-bytes=16777216",
        "--num-gpu-blocks-override=48",  # short of blocks under `Traffic`
        "--max-num-batched-tokens=512",
        "--worker-extension-cls=tests.faults.broken_worker.Breakable",
        "--vtoken-policy=auto",
        "--vtoken-budget-floor-tokens=64",  # for prompts as short as those
        "--vtoken-verify-ratio=1.0",
        f"--vtoken-read-token-file={files['read_token_file']}",
        f"--vtoken-control-token-file={files['control_token_file']}",
        f"--vtoken-state-dir={folder / 'state'}",
    ]
    with Server(
        str(demo_model),
        port=any_free_port(),
        arguments=arguments,
        log=folder / "server.log",
        environment={
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "VLLM_SERVER_DEV_MODE": "1",  # calls of the worker, for `Breakable`
        },
        startup_timeout_s=240,
        headers=bearer(READ),
    ) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=server.url, timeout=LIMIT_S, headers=bearer(CONTROL)
    ) as with_control:
        yield with_control


@pytest.fixture
async def stranger(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """Without a token."""
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as without_token:
        yield without_token


def address(server: Server) -> client.Server:
    return client.Server(server.url, CONTROL)


def listening(server: Server, query: str = "") -> connect:
    """A stream of a reader."""
    url = server.url.replace("http", "ws") + "/vtoken/v1/stream" + query
    return connect(url, additional_headers=bearer(READ), max_size=None)


class Traffic:
    """`NUM_STREAMS` clients, each sending one completion after another until the context exits."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._stop = False
        self.finished = 0
        self.wrong: list[str] = []

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(self._run(n)) for n in range(NUM_STREAMS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        for turn in itertools.count():
            if self._stop:
                return
            body = {
                "model": "demo",
                "prompt": reference.random_prompt(60 + 37 * number, number + 100 * turn),
                "max_tokens": 160,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = await self._http.post("/v1/completions", json=body)
            used = answer.json().get("usage", {}).get("completion_tokens")
            if answer.status_code != 200 or used != 160:
                self.wrong.append(answer.text)
            self.finished += 1


async def patched(http: httpx.AsyncClient, **changes: Any) -> wire.PatchResult:
    answer = await http.patch("/vtoken/v1/config", json=changes)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=wire.PatchResult)


async def test_switches_under_load_fail_no_request(server: Server, http: httpx.AsyncClient) -> None:
    seen: list[wire.Event] = []

    async def listen() -> None:
        async with listening(server, "?topics=events&format=msgpack") as stream:
            async for message in stream:
                decoded = msgspec.msgpack.decode(message, type=wire.StreamMessage)
                if isinstance(decoded, wire.EventMessage):
                    seen.append(decoded.event)

    listener = asyncio.create_task(listen())
    policies = itertools.cycle(["h2o", "random", "sliding_window", "none", "streaming_llm"])
    results = []
    async with Traffic(http) as traffic:
        for number in range(NUM_SWITCHES):
            results.append(await patched(http, policy={"name": next(policies)}))
            results.append(await patched(http, theta_f=(number % 5) / 10))
            results.append(await patched(http, batch_size=1 + number))
            mode = ("paused", "auto", "off", "auto")[number % 4]
            results.append(await patched(http, reclamation=mode))
            started = await http.post("/vtoken/v1/compactions", json={})
            assert started.status_code == 202
            operation = started.headers["location"]
            await asyncio.sleep(0.2)
            state = (await http.get(operation)).json()["state"]
            assert state in ("pending", "running", "done")
    status = msgspec.json.decode((await http.get("/vtoken/v1/status")).content, type=wire.Status)
    changed = {result.revision for result in results if result.changes}

    def shown() -> set[int]:
        return {event.data["revision"] for event in seen if event.kind == "config"}

    await until(lambda: shown() >= changed, "the stream did not show every change")
    listener.cancel()
    await asyncio.wait([listener])  # the loop's end would cancel it again, while its socket closes
    assert traffic.wrong == []
    assert traffic.finished >= NUM_STREAMS
    assert status.invariants.violations == 0
    assert status.pressure is not None
    assert status.pressure.given_tokens > 0
    assert status.reclamation.relocations > 0
    # Every change took effect at a stated step, one after the other, and the stream showed it.
    steps = [result.applied_at_step for result in results]
    assert None not in steps
    assert steps == sorted(steps)
    assert len(changed) > 3 * NUM_SWITCHES


async def test_commands_are_answered_while_the_engine_is_idle(http: httpx.AsyncClient) -> None:
    before = await patched(http, theta_f=0.5)
    after = await patched(http, theta_f=0.25)
    assert after.revision == before.revision + 1
    assert after.effective.theta_f == 0.25
    undone = await http.post("/vtoken/v1/undo")
    assert undone.json()["effective"]["theta_f"] == 0.5


async def begin_trial(server: Server, query: str, theta_f: float) -> wire.Trial:
    """Begin a trial with a client that disconnects after the response."""
    async with httpx.AsyncClient(
        base_url=server.url, timeout=LIMIT_S, headers=bearer(CONTROL)
    ) as leaving:
        answer = await leaving.patch(f"/vtoken/v1/config?{query}", json={"theta_f": theta_f})
    trial = msgspec.json.decode(answer.content, type=wire.PatchResult).trial
    assert trial is not None, answer.text
    return trial


async def ended(http: httpx.AsyncClient) -> wire.ConfigDocument:
    """The configuration once nothing is on trial and it is in effect."""

    async def config() -> wire.ConfigDocument | None:
        answer = await http.get("/vtoken/v1/config")
        config = msgspec.json.decode(answer.content, type=wire.ConfigDocument)
        settled = config.trial is None and config.effective_revision == config.revision
        return config if settled else None

    document = await until(config, "the trial does not end", every_s=0.05)
    assert isinstance(document, wire.ConfigDocument)
    return document


async def all_events(http: httpx.AsyncClient) -> list[wire.Event]:
    """All events that the engine still keeps."""
    events: list[wire.Event] = []
    while True:
        after = events[-1].seq if events else 0
        answer = await http.get(f"/vtoken/v1/events?after={after}&limit=1000")
        page = msgspec.json.decode(answer.content, type=wire.EventPage)
        if not page.events:
            return events
        events += page.events


async def test_the_engine_ends_a_trial_whose_client_disconnected(
    server: Server, http: httpx.AsyncClient
) -> None:
    """By its deadline while idle; under load by the p95 that the engine measured."""
    before = await ended(http)
    idle = await begin_trial(server, "confirm_within_s=1", 0.91)
    assert (await ended(http)).effective == before.effective
    async with Traffic(http):
        guard = {"metric": "latency_seconds{kind=inter_token,quantile=0.95}", "above": 2e-5}
        loaded = await begin_trial(server, f"guards=[{json.dumps(guard)}]", 0.92)
        assert (await ended(http)).effective == before.effective
    reasons = {
        event.data["reverted"]: (event.data["actor"], event.data["reason"])
        for event in await all_events(http)
        if "reverted" in event.data
    }
    assert reasons[idle.revision] == ("trial", "not confirmed within 1 s")
    actor, reason = reasons[loaded.revision]
    assert actor == "guard"
    assert re.fullmatch(r"p95 inter-token [\d.]+ ms > 20 µs over \d+ tokens", reason), reason
    audit = msgspec.json.decode((await http.get("/vtoken/v1/audit")).content, type=wire.AuditPage)
    reverts = [(entry.actor, entry.action) for entry in audit.entries if entry.action == "revert"]
    assert reverts == [("trial", "revert"), ("guard", "revert")]


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"policy": {"name": "h2o", "params": {"recent_ratio": 2}}}, "policy.params.recent_ratio"),
        ({"theta_f": 0.9, "budget_floor_tokens": 1}, "budget_floor_tokens"),
    ],
)
async def test_a_bad_config_names_field_value_and_bound_and_changes_nothing(
    patch: dict[str, Any], field: str, http: httpx.AsyncClient
) -> None:
    before = (await http.get("/vtoken/v1/config")).json()
    answer = await http.patch("/vtoken/v1/config", json=patch)
    problem = answer.json()
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["field"] == field
    assert problem["bound"]
    assert "value" in problem
    assert (await http.get("/vtoken/v1/config")).json() == before


async def test_malformed_and_oversized_bodies_change_nothing(http: httpx.AsyncClient) -> None:
    before = (await http.get("/vtoken/v1/config")).json()
    headers = {"content-type": "application/json"}
    url = "/vtoken/v1/config"
    malformed = await http.patch(url, content=b'{"theta_f": 0.', headers=headers)
    oversized = await http.patch(url, content=b'{"x": "' + b"a" * 200_000 + b'"}', headers=headers)
    assert malformed.status_code == 400
    assert oversized.status_code == 413
    unknown = await http.get("/vtoken/v1/requests/nobody")
    assert unknown.status_code == 404
    assert unknown.json()["value"] == "nobody"
    assert (await http.get(url)).json() == before


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"vtoken_policy": "h3o"}, "vtoken_policy"),
    ({"vtoken_budget_tokens": -1}, "vtoken_budget_tokens"),
    ({"vtoken_budget": 64}, "vtoken_budget"),
    (
        {"vtoken_policy": "random", "vtoken_policy_params": '{"recent": 0}'},
        "vtoken_policy_params.recent",
    ),
    ({"vtoken_protect": "[[0, 9], [190, 201]]"}, "leaves the prompt of 200 tokens"),
    ({"vtoken_protect": [0, 9, 5, 12]}, "vtoken_protect"),
    ({"vtoken_report": 2}, "vtoken_report = 2 is not one of 0, 1"),
]


async def test_a_bad_argument_fails_its_own_request_alone_with_400(
    http: httpx.AsyncClient,
) -> None:
    def completion(own: dict[str, Any], num_new: int) -> Any:
        body = {"model": "demo", "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        prompt = reference.random_prompt(200, 3)
        return http.post("/v1/completions", json=body | {"prompt": prompt, "vllm_xargs": own})

    good = {"vtoken_policy": "streaming_llm", "vtoken_budget_tokens": 64}
    running = asyncio.create_task(completion(good, 200))
    for arguments, named in BAD_ARGUMENTS:
        refused = await completion(arguments, 8)
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]
    answer = await running
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 200


PROMPT = reference.random_prompt(20, 5)
CHAT = [{"role": "user", "content": "hi"}]
SENT = [
    ("completions", {"prompt": PROMPT}, "tenant/42/text", 1),
    ("completions", {"prompt": [PROMPT, PROMPT]}, None, 2),
    ("completions", {"prompt": PROMPT, "n": 2, "temperature": 1}, "job-1", 2),
    ("chat/completions", {"messages": CHAT}, "job-1-2", 1),
    ("chat/completions", {"messages": CHAT}, None, 1),
    ("chat/completions/batch", {"messages": [CHAT, CHAT]}, None, 2),
    ("responses", {"input": "hi", "max_output_tokens": 4}, None, 1),
    ("responses", {"input": "hi", "max_output_tokens": 4, "request_id": "mine"}, None, 1),
]


@pytest.mark.parametrize(("path", "body", "own", "num_requests"), SENT)
async def test_requests_are_found_by_what_their_clients_know(
    path: str, body: dict[str, Any], own: str | None, num_requests: int, server: Server
) -> None:
    headers = {} if own is None else {"X-Request-Id": own}
    body = {"model": "demo", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, headers=headers) as http,
        AsyncClient(address(server)) as client,
    ):
        answer = await http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        num_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        answer_id = answer.json()["id"]
        for name in filter(None, (answer_id, own)):
            if num_requests == 1:
                detail = await client.request(name)
                assert (detail.state, detail.output_tokens) == ("finished", num_tokens)
                continue
            with pytest.raises(ProblemError, match=f"'{name}' names 2 requests: ") as e:
                await client.request(name)
            ids = e.value.problem.detail.partition(": ")[2].replace(" (finished)", "").split(", ")
            parts = [await client.request(request_id) for request_id in ids]
            assert sum(part.output_tokens for part in parts) == num_tokens
        digits = re.search("[0-9a-f]{16}", answer_id)
        if digits is not None and num_requests == 1:
            short = answer_id[: digits.start() + 8]
            assert (await client.request(short)).id.startswith(answer_id)


async def vtoken(server: Server, *arguments: str) -> str:
    """What the command prints; it must succeed."""
    ran = await run(*arguments, "--url", server.url, VTOKEN_TOKEN=CONTROL)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


async def test_command_line_and_client_work_together_on_a_busy_server(
    server: Server, http: httpx.AsyncClient
) -> None:
    async with Traffic(http) as traffic, AsyncClient(address(server)) as client:
        output = await vtoken(
            server, "config", "set", "batch_size=7", "--confirm-within=5m", "--guard-p95=30s"
        )
        assert "is on trial" in output
        trial = (await client.config()).trial
        assert trial is not None
        assert trial.guards[0].above == 30
        assert "confirmed" in await vtoken(server, "confirm")
        started = await client.compact()
        assert (await client.wait_operation(started.id)).state == "done"

        async def whole_table() -> bool:
            running = [row for row in await client.requests() if row.state == "running"]
            youngest = min(running, key=lambda row: row.output_tokens)
            with contextlib.suppress(ProblemError):  # it has ended meanwhile
                pages = await client.token_pages(youngest.id, limit=64)
                assert sum(len(page.rows) for page in pages) >= youngest.prompt_tokens
                return True
            return False

        await until(whole_table, "no request's table could be read whole")
        pool = await client.blocks()
        assert len(await client.block_live()) == pool.num_blocks
        assert gzip.decompress(await client.recording(60)).startswith(b'{"type":"recording"')
        shown = await vtoken(server, "events", "-n", "1000", "--kind", "config", "--json")
        events = [msgspec.json.decode(line, type=wire.Event) for line in shown.splitlines()]
        assert events[-1].data["confirmed"] == trial.revision
    assert traffic.wrong == []


async def test_flight_recorder_has_what_the_server_just_did(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    recording = tmp_path / "just-now.jsonl.gz"

    async def downloaded() -> list[wire.RecordingLine]:
        answer = await http.get("/vtoken/v1/recording", params={"seconds": 60})
        assert answer.status_code == 200, answer.text
        recording.write_bytes(answer.content)
        with RecordingReader(recording) as reader:
            *_, index = scan(reader, Index())
            assert (index.error, index.truncated) == (None, "")
            assert index.keyframes
            reader.rewind()
            return [entry.line for entry in iter(reader.next, None)]

    async def is_recorded() -> bool:
        lines = await downloaded()
        states = [line.status for line in lines if isinstance(line, wire.Delta) and line.status]
        changes = [line.event for line in lines if isinstance(line, wire.EventMessage)]
        return (
            len({status.step for status in states}) >= 3
            and result.revision in [e.data["revision"] for e in changes if e.kind == "config"]
            and any(isinstance(line, wire.AuditLine) for line in lines)
        )

    async with Traffic(http):
        result = await patched(http, interval_tokens=24)
        await until(is_recorded, "the change, three states and the audit line", every_s=2)


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
    stranger: httpx.AsyncClient,
) -> None:
    assert await check_every_route(stranger, READ) >= 16
    described = (await stranger.get("/openapi.json")).json()["paths"]
    assert "/vtoken/v1/status" in described


async def test_control_token_changes_and_is_audited_on_disk(
    http: httpx.AsyncClient, folder: Path
) -> None:
    await patched(http, theta_f=0.125)
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
    server: Server, stranger: httpx.AsyncClient
) -> None:
    for token in (READ, CONTROL):
        known = await stranger.get("/vtoken/v1/status", headers=bearer(token))
        assert known.status_code == 200
        refused = await stranger.get("/vtoken/v1/status", params={"token": token})
        assert refused.status_code == 401
        with pytest.raises(websockets.InvalidStatus):
            await connect(f"{listening(server).uri}?token={token}")
        broken = await stranger.request(
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


async def test_metrics_of_the_real_server_are_those_that_docs_dashboard_and_alerts_name(
    http: httpx.AsyncClient,
) -> None:
    await patched(http, **EVICTING)
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
    sometimes |= {"goodput_ratio", "draft_acceptance_ratio"}  # of an objective, with drafts
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
    files = ("docs/grafana/vtoken.json", "docs/alerts/vtoken.rules.yml")
    named = set(re.findall(r"vllm:\w+", "".join((ROOT / file).read_text() for file in files)))
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

    async def run(self, connecting: connect) -> None:
        seq, event_seq = 0, None
        async with connecting as stream:
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
    tasks = [asyncio.create_task(listener.run(listening(server))) for listener in listeners]
    async with raw_stream(server), raw_stream(server) as killed:
        while not all(listener.messages >= 2 for listener in listeners):
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in tasks)
        running = asyncio.gather(*[complete(http, n) for n in range(NUM_COMPLETIONS)])
        await asyncio.sleep(0.5)
        killed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        killed.close()  # RST
        await running
        status = (await http.get("/vtoken/v1/status")).json()
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


async def test_a_violation_ends_the_engine_and_every_client_is_told(
    server: Server, http: httpx.AsyncClient
) -> None:
    """In strict mode: the request fails, health too, the log names the invariant, and no stale
    state is served.
    """
    eager = {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 47}
    await patched(http, **EVICTING, **eager)
    async with listening(server) as stream:
        hello = json.loads(await stream.recv())
        assert hello["type"] == "hello"
        assert not hello["can_control"]
        broken = await http.post("/collective_rpc", json={"method": "lose_the_last_layer"})
        assert broken.status_code == 200, broken.text
        # The server may go down with its engine before it can answer.
        with contextlib.suppress(httpx.TransportError):
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
            assert (await http.post("/v1/completions", json=body)).status_code == 500
        await told_that_the_engine_ended(stream)
    answers = []
    with contextlib.suppress(httpx.TransportError):
        while len(answers) < 100:
            answers.append(await http.get("/vtoken/v1/status"))
            assert (await http.get("/health")).status_code != 200
            await asyncio.sleep(0.1)
    assert {answer.status_code for answer in answers} <= {503}
    assert all(answer.json()["title"] == "Engine unavailable" for answer in answers)
    assert "InvariantViolation: I1: relocation of" in server.log.read_text(errors="replace")
