"""`watch`, `events`, `record` and pipes, against a real server on the real core."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import shlex
import signal
from pathlib import Path

import msgspec
import pytest

from tests.support.cli_harness import VTOKEN, run, spawn, start
from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.cli.streaming import quiet_line
from vtoken.client import AsyncClient, ProblemError
from vtoken.recording import RecordingReader
from vtoken_api.state import journal


@pytest.mark.usefixtures("stepping")
async def test_watch_prints_a_line_for_every_state(served: Served) -> None:
    ran = await run("watch", "--interval", "0.1", "--count", "3", "--url", served.url)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) == 4
    assert all("  holes " in line for line in lines[1:])


@pytest.mark.usefixtures("stepping")
async def test_watch_as_json_is_the_stream_itself(served: Served) -> None:
    ran = await run("watch", "--json", "--count", "4", "--url", served.url)
    messages = [msgspec.json.decode(x, type=wire.StreamMessage) for x in ran.out.splitlines()]
    assert [m.seq for m in messages] == [1, 2, 3, 4]
    assert isinstance(messages[0], wire.Hello)


async def test_watch_says_that_no_step_comes_while_requests_wait(served: Served) -> None:
    last = (await run("status", "--json", "--url", served.url)).json(wire.Status)
    assert quiet_line(last, last.ts + 4) == ""
    assert "no step for 12 s while 2 requests wait" in quiet_line(last, last.ts + 12)
    idle = msgspec.structs.replace(last, requests=wire.RequestCounts(running=0, waiting=0))
    assert " run  0 wait  0 " in quiet_line(idle, last.ts + 12)


async def test_followed_events_have_no_gap_and_come_line_by_line(
    served: Served, core: LiveEngine
) -> None:
    process = await start("events", "--follow", "--json", "--url", served.url)
    assert process.stdout is not None
    try:
        events: list[wire.Event] = []
        async with asyncio.timeout(LIMIT_S):
            while len(events) < 12:
                line = await process.stdout.readline()
                events.append(msgspec.json.decode(line, type=wire.Event))
                core.runtime.events.add(0, "server", "test", {})
                core.publisher.publish(core.controller.frame)
        assert [event.seq for event in events] == list(range(1, 13))
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_events_shows_the_newest(served: Served, core: LiveEngine) -> None:
    for number in range(30):
        core.runtime.events.add(0, "server", f"number {number}", {})
    ran = await run("events", "-n", "3", "--url", served.url)
    assert [line.split(": ")[1] for line in ran.out.splitlines()] == [
        "number 27",
        "number 28",
        "number 29",
    ]
    for number in range(2000):
        core.runtime.events.add(0, "server", f"number {number}", {})
    ran = await run("events", "-n", "1500", "--url", served.url)
    lines = [line.split(": ")[1] for line in ran.out.splitlines()]
    assert lines == [f"number {number}" for number in range(500, 2000)]


@pytest.mark.usefixtures("stepping")
async def test_record_writes_what_the_stream_says(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    ran = await run("record", str(file), "--duration", "3", "--url", served.url)
    assert ran.code == 0
    header, *messages = [
        msgspec.json.decode(line, type=wire.RecordingLine) for line in file.read_text().splitlines()
    ]
    assert isinstance(header, wire.RecordingHeader)
    assert header.source == served.url
    assert [m.seq for m in messages] == list(range(1, len(messages) + 1))
    assert isinstance(messages[1], wire.Snapshot)
    again = await run("record", str(file), "--url", served.url)
    assert (again.code, "exists already" in again.err) == (2, True)


@pytest.mark.usefixtures("stepping")
async def test_record_last_writes_what_happened_just_now(served: Served, tmp_path: Path) -> None:
    async def recorded() -> bool:
        async with AsyncClient(served.url) as client:
            with contextlib.suppress(ProblemError):  # nothing is recorded yet
                return b"snapshot" in gzip.decompress(await client.recording(60))
        return False

    await until(recorded, "the flight recorder has no state yet")
    packed, plain = tmp_path / "now.jsonl.gz", tmp_path / "now.jsonl"
    for file in (packed, plain):
        ran = await run("record", str(file), "--last", "5m", "--url", served.url)
        assert (ran.code, ran.err) == (0, "")
        with RecordingReader(file) as reader:
            lines = [entry.line for entry in iter(reader.next, None)]
        assert isinstance(lines[2], wire.Snapshot)
        assert f"{len(lines) - 1:,} messages in {file}" in ran.out
    assert plain.read_bytes().startswith(b'{"type":"recording"')
    again = await run("record", str(file), "--last", "5m", "--url", served.url)
    assert (again.code, "exists already" in again.err) == (2, True)


@pytest.mark.usefixtures("stepping")
async def test_record_last_keeps_what_a_damaged_file_of_the_server_still_holds(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_S", 0.0)
    async with serve(core.handle) as served:
        segments = served.service.journal.flights[0].segments
        await until(lambda: len(segments.listed()) >= 2, "no second segment")
        first, *_ = segments.listed()
        data = bytearray(first.path.read_bytes())
        data[len(data) // 2] ^= 0x55
        first.path.write_bytes(data)
        for name in ("now.jsonl.gz", "now.jsonl"):
            file = tmp_path / name
            ran = await run("record", str(file), "--last", "5m", "--url", served.url)
            assert (ran.code, ran.out) == (1, "")
            (line,) = ran.err.splitlines()
            assert line.startswith(f"vtoken: {file}, line ")
            assert "damaged" in line
            with RecordingReader(file) as reader:
                lines = [entry.line for entry in iter(reader.next, None)]
                assert reader.damage is None
            num_messages = sum(isinstance(line, wire.Message) for line in lines)
            assert line.endswith(f"; the other {num_messages:,} messages are in {file}")
            assert any(isinstance(line, wire.Snapshot) for line in lines)


async def test_console_refuses_what_is_no_recording(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no recording\n")
    ran = await run("console", "--replay", str(file))
    assert ran.code == 1
    assert f"{file}, line 1: not a recording" in ran.err
    assert (await run("console", "--at", "12:00")).code == 2


@pytest.mark.usefixtures("stepping")
@pytest.mark.parametrize(
    "command", ["watch --interval 50ms", "watch --json", "events -f", "--help"]
)
async def test_reader_that_leaves_early_is_no_error(served: Served, command: str) -> None:
    pipe = f"set -o pipefail; {shlex.join(VTOKEN)} {command} | head -1"
    ran = await spawn("/bin/bash", "-c", pipe, VTOKEN_URL=served.url)
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) == 1


async def test_events_of_a_kind(served: Served, core: LiveEngine) -> None:
    await run("config", "set", "theta_f=0.5", "--url", served.url)
    for _ in range(30):
        core.runtime.events.add(0, "server", "noise", {})
    ran = await run("events", "-n", "2", "--kind", "config", "--json", "--url", served.url)
    assert ran.json(wire.Event).kind == "config"
    both = ("--kind", "config", "--kind", "server")
    ran = await run("events", "-n", "31", *both, "--url", served.url)
    assert len(ran.out.splitlines()) == 31
