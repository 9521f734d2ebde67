"""A server with several API processes: all answer alike, and one that is killed loses nothing.

Real processes in front of real cores. `tests/vllm/test_api_processes.py` has vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import signal
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import websockets

from tests.support.api_processes import ApiProcess, ApiProcesses, api_processes
from tests.support.core.live import LiveEngine
from tests.support.served_core import THETA_F, with_holes
from tests.support.waiting import until
from vtoken import wire
from vtoken.wire import commands
from vtoken_api.processes.member import LOCK_NAME, SOCKET_NAME
from vtoken_api.processes.messages import Call, Head, Line, Piece, Question
from vtoken_api.settings import SHARED_FOLDER, shared_folder
from vtoken_api.state.lock import FileLock
from vtoken_api.state.pending import SUFFIX, Making, Pending

ANA = {"X-VToken-Actor": "ana"}
GUARD = 'guards=[{"metric":"preemptions","above":0}]'


@contextlib.contextmanager
def cores_of(number: int) -> Iterator[list[LiveEngine]]:
    cores = [with_holes(rank) for rank in range(number)]
    try:
        yield cores
    finally:
        for core in cores:
            core.close()


@pytest.fixture
async def one() -> AsyncIterator[LiveEngine]:
    """One engine, which takes steps."""
    with cores_of(1) as (core,):
        async with core.stepping():
            yield core


@pytest.fixture
async def three(one: LiveEngine) -> AsyncIterator[ApiProcesses]:
    async with api_processes(3, [one]) as processes:
        yield processes


async def document(answer: httpx.Response, kind: Any) -> Any:
    assert answer.is_success, answer.text
    return msgspec.json.decode(answer.content, type=kind)


async def patch(process: ApiProcess, query: str = "", **values: Any) -> wire.PatchResult:
    answer = await process.http.patch(f"/config{query}", json=values, headers=ANA)
    result: wire.PatchResult = await document(answer, wire.PatchResult)
    return result


async def audit(process: ApiProcess) -> list[wire.AuditEntry]:
    answer = await process.http.get("/audit", params={"limit": 1000})
    page: wire.AuditPage = await document(answer, wire.AuditPage)
    assert page.storage_error == ""
    return page.entries


async def recorded(process: ApiProcess, engine: int = 0) -> list[wire.RecordingLine]:
    async def download() -> bytes | None:
        answer = await process.http.get("/recording", params={"engine": engine})
        return answer.content if answer.is_success else None

    content = await until(download, "nothing is recorded", every_s=0.5)
    lines = gzip.decompress(content).splitlines()
    return [msgspec.json.decode(line, type=wire.RecordingLine) for line in lines]


# ---------------------------------------------------------------- alike


async def test_any_process_answers_any_call_alike(one: LiveEngine, three: ApiProcesses) -> None:
    owner, *others = three
    # A change that one makes is seen by all.
    for number, process in enumerate(three, 1):
        result = await patch(process, theta_f=number / 10)
        for other in three:
            config = await document(await other.http.get("/config"), wire.ConfigDocument)
            assert (config.revision, config.desired.theta_f) == (result.revision, number / 10)
    entries = await audit(owner)
    assert [entry.actor for entry in entries] == ["ana@127.0.0.1"] * 3
    assert [await audit(other) for other in others] == [entries] * 2
    # An id names one change, wherever it is sent and asked for.
    headers = {"X-VToken-Change": "change-0001"}
    first = await others[0].http.patch("/config", json={"theta_f": 0.7}, headers=headers)
    assert first.is_success
    answers = [
        await process.http.patch("/config", json={"theta_f": 0.8}, headers=headers)
        for process in (owner, others[1])
    ]
    assert [answer.status_code for answer in answers] == [409, 409]
    outcomes = [(await process.http.get("/changes/change-0001")).content for process in three]
    assert outcomes == outcomes[:1] * 3
    assert msgspec.json.decode(outcomes[0], type=wire.Change).state == "applied"
    assert one.runtime.config.theta_f == 0.7
    # So is what is refused.
    for method, path, options in BAD:
        refusals = [await process.http.request(method, path, **options) for process in three]
        assert refusals[0].status_code >= 400
        assert [answer.content for answer in refusals] == [refusals[0].content] * 3, path
        heads = [_head(answer) for answer in refusals]
        assert heads == [heads[0]] * 3
    # A name of a request may have a slash.
    one.admit("chatcmpl-a/tokens-0a1b2c3d", 20)
    for process in three:
        found = await document(await process.http.get("/requests/a%2Ftokens"), wire.RequestDetail)
        assert found.id == "chatcmpl-a/tokens-0a1b2c3d"
    # And what is long, or depends on headers.
    octets = {"Accept": "application/octet-stream"}
    blocks = [await process.http.get("/blocks", headers=octets) for process in three]
    assert [answer.headers["content-type"] for answer in blocks] == ["application/octet-stream"] * 3
    health = await document(await others[0].http.get("/status"), wire.Status)
    assert [part.ok for part in health.health] == [True] * 4
    assert "recording" in health.health[-1].detail


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


async def test_tokens_and_limits_hold_in_all_processes_together(
    one: LiveEngine, tmp_path: Path
) -> None:
    tokens = {}
    for name in ("read", "control"):
        (tmp_path / name).write_text(f"the-{name}-token-0123")
        tokens[name] = {"Authorization": f"Bearer the-{name}-token-0123"}
        (tmp_path / name).chmod(0o600)
    files = {f"{name}_token_file": str(tmp_path / name) for name in tokens}
    async with api_processes(2, [one], **files) as processes:
        body = {"theta_f": 0.4}
        for process in processes:
            http = process.http
            assert (await http.get("/status")).status_code == 401
            assert (await http.get("/status", headers=tokens["read"])).status_code == 200
            refused = await http.patch("/config", json=body, headers=tokens["read"])
            assert refused.status_code == 403
            made = await http.patch("/config", json=body, headers=tokens["control"])
            assert made.status_code == 200
            headers = {"Authorization": "Bearer wrong"}
            with pytest.raises(websockets.InvalidStatus) as error:
                await websockets.connect(process.stream_url, additional_headers=headers)
            assert error.value.response.status_code == 401
        # The buckets are common: a call for recordings costs 20 reads of 400, and 100 a second.
        started = time.monotonic()
        calls = [
            processes[number % 2].http.get("/recording/x", headers=tokens["read"])
            for number in range(160)
        ]
        codes = [answer.status_code for answer in await asyncio.gather(*calls)]
        assert set(codes[0::2]) == set(codes[1::2]) == {404, 429}
        assert codes.count(404) <= (400 + 100 * (time.monotonic() - started)) / 20
        # Every process's scrape counts the refusals of all.
        pages = [await ours(process) for process in processes]
        assert pages[0]['vllm:vtoken_server_refused_calls_total{status="401"}'] == 4
        assert pages[1]['vllm:vtoken_server_refused_calls_total{status="401"}'] == 4
        assert pages[1]['vllm:vtoken_server_refused_calls_total{status="429"}'] >= 2


async def ours(process: ApiProcess) -> dict[str, float]:
    """vToken's metrics without their common labels; fails if one appears twice."""
    page = (await process.http.get(process.url + "/metrics")).text
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("vllm:vtoken_"):
            name, _, value = line.rpartition(" ")
            for label in ('engine="0",', 'model_name="core",', 'engine="0"', 'model_name="core"'):
                name = name.replace(label, "")
            name = name.replace(",}", "}").replace("{}", "")
            assert name not in found
            found[name] = float(value)
    return found


async def test_metrics_are_the_same_once_and_right_from_every_process(
    three: ApiProcesses,
) -> None:
    async with contextlib.AsyncExitStack() as streams:
        for process in three:
            stream = await streams.enter_async_context(websockets.connect(process.stream_url))
            await stream.recv()

        async def counted(number: int) -> bool:
            alive = [process for process in three if process.process.returncode is None]
            pages = [await ours(process) for process in alive]
            return all(page["vllm:vtoken_server_stream_clients"] == number for page in pages)

        await until(lambda: counted(3), "not every scrape counts all clients")
        page = await ours(three[2])
        assert page["vllm:vtoken_up"] == page["vllm:vtoken_server_recording"] == 1
        assert page["vllm:vtoken_server_audit_failing"] == 0
        await three[1].kill()
        await until(lambda: counted(2), "the clients of a process that ended are counted")


async def test_a_process_without_the_common_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SHARED_FOLDER, raising=False)
    with pytest.raises(ValueError, match="VTOKEN_API_FOLDER"):
        shared_folder(Namespace(api_server_count=2))
    assert shared_folder(Namespace(api_server_count=1)) is None


# ---------------------------------------------------------------- hand-over


async def test_owner_killed_under_load_loses_nothing_and_refuses_nobody(
    one: LiveEngine,
) -> None:
    """Four processes; the three that stay get changes and reads all the time."""
    async with api_processes(4, [one]) as four:
        owner, *stay = four
        stop = asyncio.Event()
        made: list[wire.PatchResult] = []

        async def change(process: ApiProcess, first: int) -> None:
            number = first
            while not stop.is_set():
                number += len(stay)
                made.append(await patch(process, theta_f=(number % 1000) / 1000))
                assert (await process.http.get("/status")).is_success
                assert (await audit(process))[-1].revision >= made[-1].revision
                await asyncio.sleep(0.15)  # below the limits

        async with asyncio.TaskGroup() as group:
            for first, process in enumerate(stay):
                group.create_task(change(process, first))
            await until(lambda: len(made) >= 9, "no changes")
            await owner.kill()
            before = len(made)
            await until(lambda: len(made) >= before + 9, "no changes after the owner ended")
            stop.set()
        revisions = sorted(result.revision for result in made)
        for process in stay:
            entries = await audit(process)
            assert [entry.revision for entry in entries] == revisions
            assert len({entry.change for entry in entries}) == len(entries)
        lines = await recorded(stay[0])
        noted = [line.entry.revision for line in lines if isinstance(line, wire.AuditLine)]
        assert noted == revisions
        seqs = [line.event.seq for line in lines if isinstance(line, wire.EventMessage)]
        config = [
            line.event.data["revision"]
            for line in lines
            if isinstance(line, wire.EventMessage) and line.event.kind == "config"
        ]
        assert seqs == sorted(set(seqs))
        assert seqs[-1] - seqs[0] == len(seqs) - 1, "the recording has a gap"
        assert config == revisions
        assert all("Traceback" not in process.log() for process in four)


@contextlib.asynccontextmanager
async def first_owner(
    processes: ApiProcesses, answer: Callable[[Line, Call], Awaitable[None]]
) -> AsyncIterator[None]:
    """The test is the owner, and ends with the first call for `/config`, which `answer` gets."""
    lock = FileLock(processes.shared / LOCK_NAME)
    assert lock.acquire()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        question = await line.receive(Question)
        if isinstance(question, Call) and question.scope.path.endswith("/config"):
            await answer(line, question)
            server.close()
            lock.release()
        line.close()

    server = await asyncio.start_unix_server(connected, processes.shared / SOCKET_NAME)
    yield


async def test_owner_that_ends_between_head_and_body_is_replaced(one: LiveEngine) -> None:
    calls: list[str] = []

    async def begin(line: Line, call: Call) -> None:
        calls.append(call.scope.method)
        await line.send(Head(200, [(b"content-length", b"1000")]))

    async with api_processes(0, [one]) as processes, first_owner(processes, begin):
        other = await processes.start()
        result = await patch(other, theta_f=0.5)
        assert calls == ["PATCH"]
        assert [entry.revision for entry in await audit(other)] == [result.revision]


async def test_owner_that_ends_after_a_whole_answer_takes_no_client_along(one: LiveEngine) -> None:
    """The client has all that `Content-Length` says, and calls again on the same connection."""
    body = b"whole"

    async def whole(line: Line, call: Call) -> None:
        await line.send(Head(200, [(b"content-length", b"%d" % len(body))]))
        await line.send(Piece(body))

    async with api_processes(0, [one]) as processes, first_owner(processes, whole):
        other = await processes.start()
        assert (await other.http.get("/config")).content == body
        assert (await other.http.get("/status")).is_success


async def test_owner_killed_between_two_engines_leaves_none_behind() -> None:
    with cores_of(2) as cores:
        async with api_processes(2, cores) as processes:
            owner, other = processes
            held = asyncio.Event()
            arrived = asyncio.Event()

            async def hold(rank: int, command: commands.Command) -> None:
                if rank == 1 and command.change_id is not None and not held.is_set():
                    arrived.set()
                    await held.wait()

            processes.lines.before = hold
            asked = asyncio.create_task(patch(other, theta_f=0.5))
            await arrived.wait()
            await until(lambda: cores[0].runtime.config.theta_f == 0.5, "engine 0 was not told")
            await owner.kill()
            held.set()
            result = await asked
            assert [core.runtime.config.theta_f for core in cores] == [0.5, 0.5]
            assert [core.runtime.state.revision for core in cores] == [result.revision] * 2
            assert [part.engine for part in result.engines] == [0, 1]
            assert [(e.action, e.engine) for e in await audit(other)] == [("config", None)]


async def test_change_whose_answer_the_owner_did_not_get_is_made_and_entered_once(
    one: LiveEngine,
) -> None:
    async with api_processes(2, [one]) as processes:
        owner, other = processes
        made, killed = asyncio.Event(), asyncio.Event()

        async def hold(rank: int, command: commands.Command) -> None:
            if command.op == "forget" and not killed.is_set():
                made.set()
                await killed.wait()

        processes.lines.after = hold
        spans = {"spans": [[0, 4]]}
        call = other.http.post("/requests/r0/forget", json=spans, headers=ANA)
        asked = asyncio.create_task(call)
        await made.wait()
        await owner.kill()
        killed.set()
        answer = await asked
        assert answer.is_success, answer.text
        assert [(e.action, e.actor) for e in await audit(other)] == [("forget", "ana@127.0.0.1")]
        assert one.runtime.state.num_forgets == 1


async def test_change_that_was_entered_is_not_entered_again_by_the_next_owner(
    one: LiveEngine,
) -> None:
    """The owner ends after it wrote the entry, and before it forgot the change."""
    async with api_processes(1, [one]) as processes:
        (owner,) = processes
        result = await patch(owner, theta_f=0.5)
        (entry,) = await audit(owner)
        await owner.kill()
        call = commands.PatchConfig(patch={"theta_f": 0.5})
        making = Making(entry.change, entry.actor, "config", call, {0: call}, expires_ts=1e10)
        await Pending(processes.shared).begin(making)
        unfinished = processes.shared / f"unfinished{SUFFIX}"
        unfinished.write_bytes(msgspec.msgpack.encode(making)[:-3])
        next_owner = await processes.start()
        after = await patch(next_owner, theta_f=0.6)
        revisions = [entry.revision for entry in await audit(next_owner)]
        assert revisions == [result.revision, after.revision]
        assert [*processes.shared.glob(f"*{SUFFIX}")] == [unfinished]


async def test_streams_stay_and_a_client_resumes_at_any_process(three: ApiProcesses) -> None:
    owner, other, third = three
    async with websockets.connect(other.stream_url) as stream:
        hello = await message(stream)
        assert isinstance(hello, wire.Hello)
        await owner.kill()
        first = await patch(third, theta_f=0.5)
        events: list[wire.Event] = []
        seq = hello.seq
        while not (events and events[-1].data.get("revision") == first.revision):
            found = await message(stream)
            assert found.seq == seq + 1
            seq = found.seq
            if isinstance(found, wire.EventMessage):
                events.append(found.event)
    second = await patch(other, theta_f=0.6)
    position = f"{hello.epoch}:{events[-1].seq}"
    async with websockets.connect(f"{third.stream_url}?resume={position}") as stream:
        hello = await message(stream)
        assert isinstance(hello, wire.Hello)
        assert hello.resumed
        snapshot = await message(stream)
        assert isinstance(snapshot, wire.Snapshot)
        assert snapshot.history
        last = events[-1].seq
        while events[-1].data.get("revision") != second.revision:
            found = await message(stream)
            if isinstance(found, wire.EventMessage):
                assert found.event.seq == last + 1
                last = found.event.seq
                events.append(found.event)


async def message(stream: websockets.ClientConnection) -> wire.Message:
    found: wire.Message = msgspec.json.decode(await stream.recv(), type=wire.StreamMessage)
    return found


async def test_owner_that_is_asked_to_end_hands_over_while_it_still_serves(
    one: LiveEngine,
) -> None:
    async with api_processes(2, [one]) as processes:
        owner, other = processes
        before = await patch(owner, theta_f=0.5)
        owner.process.send_signal(signal.SIGTERM)

        async def recording() -> bool:
            page = await ours(other)
            assert owner.process.returncode is None
            return "answers for all" in other.log() and bool(
                page.get("vllm:vtoken_server_recording")
            )

        await until(recording, "the other process does not take over")
        after = await patch(other, theta_f=0.6)
        revisions = [entry.revision for entry in await audit(other)]
        assert revisions == [before.revision, after.revision]
        lines = await recorded(other)
        noted = [line.entry.revision for line in lines if isinstance(line, wire.AuditLine)]
        assert noted == revisions


async def test_rollout_outlives_the_owner() -> None:
    with cores_of(2) as cores:
        async with api_processes(2, cores) as (owner, other):
            query = f"?canary_engine=1&{GUARD}&guard_for_s=2"
            await patch(other, query, theta_f=0.5)
            await owner.kill()

            async def followed() -> bool:
                return [(e.action, e.engine) for e in await audit(other)] == [
                    ("trial", 1),
                    ("keep", 1),
                    ("rollout", 0),
                ]

            await until(followed, "engine 0 does not follow, or it is not entered")
            assert [core.runtime.config.theta_f for core in cores] == [0.5, 0.5]


async def test_trial_outlives_the_owner_and_is_reverted_on_all_engines_once() -> None:
    with cores_of(2) as cores:
        async with api_processes(2, cores) as (owner, other):
            query = f"?{GUARD}&guard_for_s=300"
            trial = await patch(other, query, theta_f=0.5)
            await owner.kill()
            cores[1].runtime.counters.requests.preempted += 1
            cores[1].steps(1)
            assert cores[1].runtime.config.theta_f == THETA_F

            async def reverted() -> bool:
                return len(await audit(other)) >= 3

            await until(reverted, "engine 0 keeps the trial, or it is not entered")
            entries = await audit(other)
            assert [(e.action, e.actor, e.engine) for e in entries] == [
                ("trial", "ana@127.0.0.1", None),
                ("revert", "guard", 1),
                ("revert", "guard of engine 1", 0),
            ]
            assert [core.runtime.config.theta_f for core in cores] == [THETA_F] * 2
            assert [core.runtime.state.revision for core in cores] == [trial.revision + 1] * 2
