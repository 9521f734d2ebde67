"""The flight recorder on a real server, also with disk errors."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.core.live import LiveEngine, make_engine
from tests.support.serving import Served, serve
from tests.support.stream_messages import stream
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.recording import Index, RecordingReader, scan
from vtoken_api.limits import RateLimits
from vtoken_api.state import journal, recorder
from vtoken_api.state.segments import Segments, SegmentWriter, chunks

FLIGHT = "/vtoken/v1/recording"


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    core = make_engine(max_hz=1000.0)
    core.steps(30)
    assert core.runtime.counters.pressure.given_tokens > 0
    async with core.stepping():
        yield core
    core.close()


@contextlib.asynccontextmanager
async def flying(core: LiveEngine, folder: Path) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """A server with the state directory `folder`, and its client."""
    async with (
        serve(core.handle, state_dir=str(folder)) as served,
        httpx.AsyncClient(base_url=served.url, timeout=LIMIT_S) as client,
    ):
        served.service.auth.limits = RateLimits({})  # a test may ask as often as it waits
        yield served, client


def lines_of(content: bytes) -> list[wire.RecordingLine]:
    return [
        msgspec.json.decode(line, type=wire.RecordingLine)
        for line in gzip.decompress(content).splitlines()
    ]


ANA = {"X-VToken-Actor": "ana"}


async def test_what_happened_just_now_is_downloaded(core: LiveEngine, tmp_path: Path) -> None:
    async with flying(core, tmp_path) as (_, client):

        async def deltas() -> list[wire.Delta]:
            answer = await client.get(FLIGHT)
            lines = lines_of(answer.content) if answer.status_code == 200 else []
            return [line for line in lines if isinstance(line, wire.Delta)]

        async def changed() -> bool:
            return any(delta.config is not None for delta in await deltas())

        await until(deltas, "not recording", every_s=0.2)
        answer = await client.patch("/vtoken/v1/config", json={"theta_f": 0.4}, headers=ANA)
        assert answer.status_code == 200
        await until(changed, "no state after the change", every_s=0.2)
        answer = await client.get(FLIGHT, params={"seconds": 60})
    assert answer.status_code == 200
    header, hello, snapshot, *rest = lines_of(answer.content)
    assert isinstance(header, wire.RecordingHeader)
    assert header.source == "flight recorder"
    assert (type(hello), type(snapshot)) == (wire.Hello, wire.Snapshot)
    assert not hello.can_control
    deltas = [line for line in rest if isinstance(line, wire.Delta)]
    assert deltas[-1].status.step > snapshot.status.step
    events = [line.event for line in rest if isinstance(line, wire.EventMessage)]
    assert [event.seq for event in events] == list(range(events[0].seq, events[-1].seq + 1))
    assert any(event.kind == "config" for event in events)
    (audit,) = [line.entry for line in rest if isinstance(line, wire.AuditLine)]
    assert audit.actor.startswith("ana@")
    path = tmp_path / "just-now.jsonl.gz"
    path.write_bytes(answer.content)
    with RecordingReader(path) as reader:
        *_, index = scan(reader, Index())
        assert (index.truncated, index.error, len(index.keyframes)) == ("", None, 1)


async def test_recording_has_every_audit_entry_once_also_after_a_restart(
    core: LiveEngine, tmp_path: Path
) -> None:
    state = {"state_dir": str(tmp_path)}
    async with serve(core.handle, **state) as before, httpx.AsyncClient(timeout=LIMIT_S) as client:
        await until(lambda: before.engine.flight.recording, "not recording")
        await client.patch(before.url + "/vtoken/v1/config", json={"theta_f": 0.9}, headers=ANA)
    async with serve(core.handle, **state) as served, httpx.AsyncClient(timeout=LIMIT_S) as client:
        for number in range(3):
            answer = await client.patch(
                served.url + "/vtoken/v1/config",
                json={"theta_f": number / 10},
                headers={"X-VToken-Actor": f"n{number}"},
            )
            assert answer.status_code == 200
        await until(lambda: served.engine.flight.recording, "not recording")
        for _ in range(2):  # the second finds nothing new
            lines = lines_of((await client.get(served.url + FLIGHT)).content)
        entries = [line.entry for line in lines if isinstance(line, wire.AuditLine)]
        names = [entry.actor.partition("@")[0] for entry in entries]
        assert names == ["ana", "n0", "n1", "n2"]


async def test_segments_follow_one_another_without_losing_an_event(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_S", 0.0)
    async with flying(core, tmp_path) as (served, client):
        segments = served.service.journal.flights[0].segments
        await until(lambda: len(segments.listed()) >= 4, "no segments")
        served.bus.timeout_s, served.line.hangs = 0.05, True  # in a long step
        num_segments = len(segments.listed())
        await until(lambda: len(segments.listed()) > num_segments, "none in a long step")
        assert served.engine.flight.problem == ""
        served.line.hangs = False
        lines = lines_of((await client.get(FLIGHT)).content)
    snapshots = [line for line in lines if isinstance(line, wire.Snapshot)]
    assert sum(isinstance(line, wire.RecordingHeader) for line in lines) == len(snapshots) > 4
    seqs = [line.event.seq for line in lines if isinstance(line, wire.EventMessage)]
    assert seqs == list(range(seqs[0], seqs[-1] + 1))


def test_a_segment_ends_with_its_size(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    writer = SegmentWriter(segments, 3600.0, 6000)
    for message, _ in stream(200):
        writer.take(msgspec.json.encode(message), message)
        writer.flush()
    writer.close()
    sizes = [segment.num_bytes for segment in segments.listed()]
    assert len(sizes) > 3
    assert all(6000 <= size < 12_000 for size in sizes[:-1])


async def test_server_that_stops_while_a_segment_ends_leaves_none_open(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_S", 0.0)
    ending, may_end, finish = threading.Event(), threading.Event(), Segments.finish

    def slow_finish(self: Segments, path: Path) -> None:
        ending.set()
        may_end.wait(LIMIT_S)
        finish(self, path)

    monkeypatch.setattr(Segments, "finish", slow_finish)
    async with flying(core, tmp_path) as (served, _):
        segments = served.service.journal.flights[0].segments
        await until(ending.is_set, "no segment ends")
        closing = asyncio.create_task(served.app.state.plugin.close())
        await asyncio.sleep(0)
        may_end.set()
        await closing
        assert not any(segment.open for segment in segments.listed())


async def test_recording_asks_for_one_state_a_second_and_nothing_of_the_publisher(
    core: LiveEngine, tmp_path: Path
) -> None:
    async with flying(core, tmp_path) as (served, _):
        await until(lambda: served.engine.flight.recording, "not recording")

        def asked() -> int:
            return sum(call.op == "frame" for call in served.line.calls)

        before, start = asked(), time.monotonic()
        await until(lambda: asked() >= before + 3, "no states")
        assert time.monotonic() - start > 1.9  # the first of the three may have been due
        assert not core.publisher._subscribers[wire.TOPIC_STATE]


async def test_files_are_for_their_user_alone(core: LiveEngine, tmp_path: Path) -> None:
    async with flying(core, tmp_path) as (served, _):
        segments = served.service.journal.flights[0].segments
        await until(segments.listed, "no segment")
        assert {each.path.stat().st_mode & 0o777 for each in segments.listed()} == {0o600}


async def test_disk_that_refuses_stops_the_recording_and_nothing_else(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.1)
    monkeypatch.setattr(journal, "SEGMENT_S", 0.0)
    async with flying(core, tmp_path) as (served, client):
        flight, segments = served.engine.flight, served.service.journal.flights[0].segments
        await until(lambda: flight.recording, "not recording")
        folder, away = segments.directory, tmp_path / "away"
        folder.rename(away)
        folder.write_text("a file where the directory was")  # the next segment cannot be opened
        await until(lambda: flight.problem, "no problem")
        answer = await client.get(FLIGHT)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert "the flight recorder stopped at" in answer.json()["detail"]
        assert flight.num_faults > 0
        assert (await client.get("/vtoken/v1/status")).status_code == 200
        await client.patch("/vtoken/v1/config", json={"theta_f": 0.4}, headers=ANA)
        folder.unlink()
        await until(lambda: flight.recording and not flight.problem, "did not go on")
        await until(lambda: segments.listed(), "no segment")
        answer = await client.get(FLIGHT)
        assert answer.status_code == 200
        lines = lines_of(answer.content)
        (entered,) = [line.entry for line in lines if isinstance(line, wire.AuditLine)]
        assert entered.changes == {"theta_f": [0.25, 0.4]}


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not Path("/dev/shm").is_mount(),
    reason="fills a small file system of its own, which only root can mount",
)
async def test_full_disk_is_said_once_and_recording_goes_on_when_there_is_space(
    core: LiveEngine,
    tmp_path: Path,
    server_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.1)
    mount = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path), stderr=-3
    )
    if await mount.wait() != 0:
        pytest.skip("mounting is not allowed here")
    try:
        ballast = tmp_path / "ballast"
        async with flying(core, tmp_path) as (served, client):
            flight = served.engine.flight
            await until(lambda: flight.recording, "not recording")
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            await until(lambda: "No space left on device" in flight.problem, "not noticed")
            answer = await client.get(FLIGHT)
            assert answer.status_code == 503
            assert "No space left on device" in answer.json()["detail"]
            faults = flight.num_faults
            await until(lambda: flight.num_faults > faults + 2, "it does not try again")
            messages = {record.getMessage() for record in server_log.records}
            assert sum("the flight recorder stopped" in said for said in messages) == 1
            assert (await client.get("/vtoken/v1/status")).status_code == 200
            ballast.unlink()
            await until(lambda: flight.recording and not flight.problem, "did not go on")
            assert lines_of((await client.get(FLIGHT)).content)
            assert "the flight recorder is recording again" in server_log.text
    finally:
        await (await asyncio.create_subprocess_exec("umount", "-l", str(tmp_path))).wait()


async def test_seconds_out_of_bounds_are_refused(core: LiveEngine, tmp_path: Path) -> None:
    async with flying(core, tmp_path) as (_, client):
        for value in ("0", "90000", "soon"):
            answer = await client.get(FLIGHT, params={"seconds": value})
            assert (answer.status_code, answer.json()["field"]) == (422, "seconds")
            assert answer.json()["bound"] == "1..86400"


def write(folder: Path, start_ms: int, size: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"flight-{start_ms:013}-1.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"type":"x"}\n', 0).ljust(size, b"\0")[:size])
    return path


def test_oldest_segments_go_first(tmp_path: Path) -> None:
    segments = Segments(tmp_path, max_bytes=1000, max_age_s=float("inf"))
    paths = [write(tmp_path, n, 300) for n in (1000, 2000, 3000)]
    (tmp_path / "notes.txt").write_bytes(bytes(5000))
    segments.prune()
    assert all(path.exists() for path in paths)
    segments.prune(reserve_bytes=200)
    assert [path.exists() for path in paths] == [False, True, True]
    assert (tmp_path / "notes.txt").exists()
    Segments(tmp_path, max_bytes=1000, max_age_s=60).prune()
    assert [path.exists() for path in paths] == [False, False, False]


def test_segments_cover_the_time_asked_for(tmp_path: Path) -> None:
    segments = Segments(tmp_path, max_bytes=10_000)
    for n in (1000, 2000, 3000):
        os.utime(write(tmp_path, n * 1000, 100), (n + 999, n + 999))
    assert [s.start_ts for s in segments.since(2500)] == [2000, 3000]
    assert [s.start_ts for s in segments.since(9000)] == []
    assert [s.start_ts for s in segments.since(0)] == [1000, 2000, 3000]


def record(segments: Segments, start_ts: float) -> Path:
    """A finished segment of a minute, written while the clock shows `start_ts` and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: start_ts)
        path = segments.new_path()
    path.write_bytes(bytes(300))
    segments.finish(path)
    path = path.with_name(path.name.replace(".open.", "."))
    os.utime(path, (start_ts + 60, start_ts + 60))
    return path


def test_segments_of_a_clock_that_was_ahead_are_older_than_those_after_it(tmp_path: Path) -> None:
    segments = Segments(tmp_path, max_bytes=1000)
    now, year = time.time(), 365 * 86_400.0
    ahead = [record(segments, now + year + 60 * n) for n in range(2)]
    fresh = [record(segments, now - 180 + 60 * n) for n in range(2)]
    assert [segment.path for segment in segments.listed()] == [*ahead, *fresh]
    assert [segment.path for segment in segments.since(now - 100)] == fresh[1:]
    assert [segment.path for segment in segments.since(now - 200)] == [ahead[1], *fresh]
    segments.prune()
    assert [path.exists() for path in (*ahead, *fresh)] == [False, True, True, True]
    segments.prune(reserve_bytes=300)
    assert [path.exists() for path in fresh] == [True, True]
    assert segments.new_path().name > fresh[1].name


def test_segments_of_a_clock_that_was_ahead_expire_a_day_after_they_were_written(
    tmp_path: Path,
) -> None:
    segments = Segments(tmp_path, max_bytes=10_000)
    now = time.time()
    ahead = record(segments, now + 365 * 86_400.0)
    fresh = [record(segments, now - 86_400.0 - 3600.0), record(segments, now - 60)]
    segments.prune()
    assert [path.exists() for path in (ahead, *fresh)] == [False, False, True]


def test_segments_of_an_earlier_version_are_read_and_precede_new_ones(tmp_path: Path) -> None:
    segments = Segments(tmp_path, max_bytes=10_000)
    now = time.time()
    old = [write(tmp_path, int((now + seconds) * 1000), 300) for seconds in (-120, 86_400)]
    new = record(segments, now - 60)
    assert [segment.path for segment in segments.listed()] == [*old, new]


def test_segment_that_is_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 1000, 100)
    (segment,) = Segments(tmp_path, max_bytes=1).listed()
    path.unlink()
    assert list(chunks(segment)) == []
