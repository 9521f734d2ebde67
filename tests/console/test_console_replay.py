"""A recording in the console: the same views, from any moment, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.console_harness import messages, screen_text, until
from tests.support.recorded import START_TS, record
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.base.request_ids import short_id
from vtoken.recording import RecordingReader, RecordingWriter
from vtoken_console.app.app import ConsoleApp
from vtoken_console.feed.data import FeedData
from vtoken_console.feed.replay import Replay
from vtoken_console.screens.request import NOT_RECORDED
from vtoken_console.style import units

SECONDS = 60.0


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "incident.jsonl.gz"
    record(path, SECONDS)
    return path


def told_until(path: Path, ts: float) -> FeedData:
    """The state after every message up to `ts`, read from the start."""
    data = FeedData()
    with RecordingReader(path) as reader:
        for entry in iter(reader.next, None):
            if isinstance(entry.line, wire.Message) and entry.line.ts <= ts:
                data.apply(entry.line)
    return data


@contextlib.asynccontextmanager
async def playing(path: Path, **options: Any) -> AsyncIterator[Replay]:
    replay = Replay(path, **options)
    task = asyncio.create_task(replay.run())
    await until(lambda: replay.feed.connection.is_live and replay.index.complete, "does not play")
    try:
        yield replay
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def shown(
    path: Path, size: tuple[int, int] = (120, 36), moment: str | None = "30"
) -> AsyncIterator[Any]:
    """The real app on a recording, paused at `moment`; yields (app, pilot)."""
    app = ConsoleApp(path.name, recording=path, moment=moment, read_only=True)
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(lambda: app.source is not None and app.dashboard.synced, "no data")
        await until(lambda: app.source.replay.indexed, "not indexed")
        await pilot.pause(0.2)
        yield app, pilot


async def test_a_seek_shows_the_state_of_all_messages_up_to_there(recording: Path) -> None:
    async with playing(recording, moment="0") as replay:
        for after_s in (31.0, 7.3, 59.9, 0.0, 44.44):
            replay.seek(START_TS + after_s)
            await until(lambda: replay.ready, "does not arrive")
            expected = told_until(recording, START_TS + after_s)
            assert np.array_equal(replay.feed.model.live, expected.model.live)
            assert np.array_equal(replay.feed.model.flags, expected.model.flags)
            assert dict(replay.feed.model.requests) == dict(expected.model.requests)
            assert replay.feed.model.status == expected.model.status
            assert replay.feed.model.config == expected.model.config
            assert replay.feed.model.events == expected.model.events
            assert replay.feed.data.series.markers == expected.series.markers
            assert replay.feed.data.series.last_ts == expected.series.last_ts
            both = (replay.feed.data.series, expected.series)
            ours, theirs = (series.window(60, 60).row("free_blocks") for series in both)
            assert np.array_equal(ours, theirs, equal_nan=True)


async def test_playing_leads_to_the_same_state_as_seeking(recording: Path) -> None:
    async with playing(recording) as replay:
        replay.faster(99)
        await until(lambda: replay.feed.model.status.ts >= START_TS + 12, "does not move")
        replay.toggle_pause()
        at = replay.feed.model.status.ts
        assert np.array_equal(replay.feed.model.live, told_until(recording, at).model.live)
        before = replay.replay.ts
        await asyncio.sleep(0.3)
        assert replay.replay.ts == before


async def test_a_step_is_one_message(recording: Path) -> None:
    async with playing(recording, moment="10") as replay:
        with RecordingReader(recording) as reader:
            lines = [entry.line for entry in iter(reader.next, None)]
        seqs = [line.seq for line in lines if isinstance(line, wire.Delta | wire.EventMessage)]
        seen = []
        for _ in range(12):
            before = replay.feed.received
            replay.step()
            await until(lambda before=before: replay.feed.received > before, "no step")
            seen.append(replay.feed.model.seq)
        held = [seq for seq in dict.fromkeys(seen) if seq in seqs]
        first = seqs.index(held[0])
        assert held == seqs[first : first + len(held)]
        assert len(held) >= 10


async def test_playing_at_the_end_restarts(recording: Path) -> None:
    async with playing(recording) as replay:
        replay.seek(START_TS + SECONDS - 0.1)
        await until(lambda: replay.replay.at_end, "does not end")
        assert replay.replay.ts == START_TS + SECONDS
        replay.toggle_pause()
        await until(lambda: replay.replay.ts < START_TS + 5, "does not start anew")


async def test_file_that_is_still_written_is_followed(tmp_path: Path, recording: Path) -> None:
    with RecordingReader(recording) as reader:
        lines = [line for _, line in iter(reader.raw, None)]
    growing = tmp_path / "growing.jsonl"
    growing.write_bytes(b"".join(line + b"\n" for line in lines[:100]))
    async with playing(growing) as replay:
        replay.seek(replay.index.last_ts)
        await until(lambda: replay.replay.at_end, "does not reach the present end")
        end = replay.replay.last_ts
        with growing.open("ab") as file:
            file.writelines(line + b"\n" for line in lines[100:140])
        await until(lambda: replay.replay.last_ts > end, "does not follow")


async def test_log_shows_dry_runs_and_actors_up_to_the_moment(
    tmp_path: Path, recording: Path
) -> None:
    path = tmp_path / "audited.jsonl"
    entries = [
        wire.AuditEntry(START_TS + at, actor, "config", {"theta_f": [0.25, to]}, 1, True)
        for at, actor, to in ((20.0, "ana", 0.11), (40.0, "ben", 0.12))
    ]
    with RecordingReader(recording) as reader, RecordingWriter(path, source="test") as writer:
        for entry in iter(reader.next, None):
            if isinstance(entry.line, wire.Message):
                while entries and entries[0].ts <= entry.line.ts:
                    writer.audit([entries.pop(0)])
                writer.write(msgspec.json.encode(entry.line))
    async with shown(path, size=(120, 60), moment="30") as (app, _):
        app.dashboard.show_panel("log")
        expected = "config (dry run) by {}: theta_f 0.25 → {}"
        await until(lambda: expected.format("ana", "0.11") in screen_text(app), "not shown")
        assert "by ben" not in screen_text(app)
        app.source.seek(START_TS + 45)
        await until(lambda: expected.format("ben", "0.12") in screen_text(app), "not shown later")
        assert expected.format("ana", "0.11") in screen_text(app)


async def test_torn_recording_plays_and_reports_what_is_missing(
    tmp_path: Path, recording: Path
) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(recording.read_bytes()[:-500])
    async with playing(torn) as replay:
        assert "cut off" in replay.replay.note or "not finished" in replay.replay.note
        assert replay.replay.last_ts > START_TS + SECONDS / 2


async def test_gap_is_reported_and_ends_at_the_next_key_frame(
    tmp_path: Path, recording: Path
) -> None:
    with RecordingReader(recording) as reader:
        lines = [line for _, line in iter(reader.raw, None)]
    deltas = [n for n, line in enumerate(lines) if line.startswith(b'{"type":"delta"')]
    del lines[deltas[20]]
    holed = tmp_path / "holed.jsonl"
    holed.write_bytes(b"".join(line + b"\n" for line in lines))
    async with playing(holed, moment="6") as replay:
        await until(lambda: replay.ready, "does not arrive")
        assert "a gap before" in replay.replay.note
        replay.seek(START_TS + 30)
        await until(lambda: replay.ready, "does not arrive")
        assert replay.replay.note == ""
        expected = told_until(recording, START_TS + 30)
        assert np.array_equal(replay.feed.model.live, expected.model.live)


async def test_recording_without_a_snapshot_is_refused_with_a_message(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    RecordingWriter(empty, source="test").close()
    replay = Replay(empty)
    task = asyncio.create_task(replay.run())
    await until(lambda: "no snapshot" in replay.feed.connection.error, "no message")
    task.cancel()


# ---------------------------------------------------------------- on the screen


def at(seconds: float) -> Callable[[Any], bool]:
    return lambda app: abs(app.source.replay.ts - START_TS - seconds) < 1e-6


async def test_keys_seek_step_and_change_the_speed(recording: Path) -> None:
    async with shown(recording) as (app, pilot):
        assert app.dashboard.query_one("#requests").has_focus
        app.dashboard.query_one("#replay").focus()
        for key, seconds in (
            ("left", 25),
            ("right", 30),
            ("right_square_bracket", 35),
            ("left_square_bracket", 30),
            ("home", 0),
            ("end", 60),
            ("left", 55),
        ):
            await pilot.press(key)
            await until(lambda to=seconds: at(to)(app), f"{key} leads elsewhere")
        await pilot.press("greater_than_sign", "greater_than_sign")
        assert app.source.replay.speed == 4.0
        await pilot.press("less_than_sign")
        assert app.source.replay.speed == 2.0
        assert app.source.replay.paused
        await pilot.press("space")
        assert not app.source.replay.paused


async def test_digits_are_a_moment_to_go_to(recording: Path) -> None:
    async with shown(recording) as (app, pilot):
        await pilot.press("4", "2")
        assert "go to 42_" in screen_text(app)
        await pilot.press("enter")
        await until(lambda: at(42)(app), "does not go there")
        await pilot.press("9", "9", "9", "enter")
        await pilot.pause(0.2)
        assert "'999' is not a moment of this recording" in messages(app)
        assert at(42)(app)


async def test_screen_shows_the_past_state_and_is_marked_as_a_recording(recording: Path) -> None:
    async with shown(recording) as (app, pilot):
        await pilot.pause(0.2)
        text = screen_text(app)
        expected = told_until(recording, START_TS + 30).model
        assert expected.status.fragmentation.sentence in text
        assert " recording " in text.splitlines()[0]
        assert "live" not in text.splitlines()[0]
        assert "00:30/01:00" in text
        assert "theta_f 0.25 → 0.4" in text  # the mark at the playhead
        for row in expected.requests.values():
            assert short_id(row.id) in text


async def test_key_bar_of_a_recording_offers_nothing_that_needs_a_server(recording: Path) -> None:
    async with shown(recording) as (app, _):
        await until(lambda: "filter" in screen_text(app).splitlines()[-1], "no keys")
        bar = screen_text(app).splitlines()[-1]
        absent = ("pause", "dry run", "policy", "floor", "undo")
        assert [word for word in absent if word in bar] == []


@pytest.mark.parametrize("key", ["H", "c", "u", "f"])
async def test_controls_are_refused_because_it_is_a_recording(recording: Path, key: str) -> None:
    async with shown(recording) as (app, pilot):
        await pilot.press(key)
        await pilot.pause(0.1)
        assert "this is a recording" in messages(app)
        assert app.screen is app.dashboard


async def test_pages_that_query_a_server_show_what_a_recording_holds(recording: Path) -> None:
    async with shown(recording) as (app, pilot):
        model = app.source.feed.model
        used = int(np.flatnonzero(model.flags)[3])
        await app.dashboard.open_block(used)
        await pilot.pause(0.3)
        text = screen_text(app)
        assert "A recording holds no slots" in text
        assert f"{int(model.live[used])}/16 live" in text
        await pilot.press("escape")
        row = next(iter(model.requests.values()))
        await app.dashboard.open_request(row.id)
        await until(lambda: NOT_RECORDED[0] in " ".join(screen_text(app).split()), "not said")
        assert "loading" not in screen_text(app)
        assert f"live {units.count(row.live, 5)}" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_bar_fits_the_terminal(recording: Path, size: tuple[int, int]) -> None:
    async with shown(recording, size=size) as (app, pilot):
        await pilot.pause(0.2)
        lines = screen_text(app).splitlines()
        assert len(lines) == size[1]
        assert any("paused" in line and "00:30/01:00" in line and "1x" in line for line in lines)


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "fastapi", "zmq", "transformers"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
import asyncio, pathlib
from vtoken_console.app.app import ConsoleApp

async def main():
    path = pathlib.Path(sys.argv[1])
    app = ConsoleApp(path.name, recording=path, moment="30", read_only=True)
    async with app.run_test(size=(120, 36)) as pilot:
        while not (app.source and app.source.replay.indexed and app.source.feed.model.status):
            await pilot.pause(0.05)
        await pilot.pause(0.3)
        print(app.export_screenshot())

asyncio.run(main())
"""


def test_an_incident_file_opens_on_a_machine_without_the_engine(recording: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(recording)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "00:30/01:00" in done.stdout
    assert "test-llama" in done.stdout


async def test_an_idle_moment_of_a_recording_suggests_no_request(tmp_path: Path) -> None:
    record(tmp_path / "idle.jsonl.gz", 4.0, concurrency=0)
    async with shown(tmp_path / "idle.jsonl.gz", moment="2") as (app, _):
        assert "No request was running at this moment." in screen_text(app)
        assert "curl" not in screen_text(app)
