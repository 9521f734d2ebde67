"""The health of the server's parts, in status and stream."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken_api import engine
from vtoken_api.state import journal, recorder
from vtoken_api.state.statedir import StateDir


def parts(served: Served) -> dict[str, wire.Health]:
    return {part.name: part for part in served.engine.health()}


async def status_of(served: Served) -> wire.Status:
    async with httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.get("/vtoken/v1/status")
        assert answer.status_code == 200
        return msgspec.json.decode(answer.content, type=wire.Status)


async def test_status_names_every_part_and_all_are_ok(served: Served) -> None:
    await until(lambda: served.engine.flight.recording, "not recording")
    health = (await status_of(served)).health
    assert [part.name for part in health] == ["engine", "frames", "audit", "recorder"]
    assert all(part.ok and part.detail and part.since_ts is None for part in health)


async def test_dead_recorder_is_in_status_and_stream_with_its_fault_and_time(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.05)
    monkeypatch.setattr(journal, "SEGMENT_S", 0.0)
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        flight = served.engine.flight
        await until(lambda: flight.recording, "not recording")
        folder = served.service.journal.flights[0].segments.directory
        folder.rename(tmp_path / "away")
        folder.write_text("a file where the directory was")
        # The next segment cannot be opened.
        await until(lambda: not parts(served)["recorder"].ok, "not noticed")
        (dead,) = [part for part in (await status_of(served)).health if not part.ok]
        assert (dead.name, dead.detail.partition(":")[0]) == ("recorder", "stopped")
        assert dead.since_ts == pytest.approx(flight.stopped_ts)
        async with connect(served.stream_url + "?topics=metrics") as stream:
            shown: dict[str, bool] = {}
            while shown.get("recorder") is not False:  # a frame says how it was when it came
                message = msgspec.json.decode(await asyncio.wait_for(stream.recv(), LIMIT_S))
                status = message.get("status") or {"health": []}
                shown |= {part["name"]: part["ok"] for part in status["health"]}
        folder.unlink()
        await until(lambda: parts(served)["recorder"].ok, "did not go on")


async def test_audit_log_that_cannot_be_written_is_told_without_an_entry(
    core: LiveEngine, tmp_path: Path
) -> None:
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        (tmp_path / "bad").symlink_to(tmp_path)  # a directory where the file should be
        (tmp_path / "bad").replace(tmp_path / "audit.jsonl")
        await served.service.journal.probe()
        audit = parts(served)["audit"]
        assert not audit.ok
        assert "Is a directory" in audit.detail
        assert audit.since_ts == pytest.approx(time.time(), abs=60)
        (tmp_path / "audit.jsonl").unlink()
        await served.service.journal.probe()
        assert parts(served)["audit"].ok


async def test_server_waits_for_a_state_directory_that_another_one_uses(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.05)
    other = StateDir(tmp_path)
    other.acquire()
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        for name in ("audit", "recorder"):
            await until(lambda name=name: not parts(served)[name].ok, "not noticed")
            assert f"another server uses {tmp_path}" in parts(served)[name].detail
        other.close()
        await until(lambda: parts(served)["recorder"].ok, "did not go on")
        await served.service.journal.probe()
        assert parts(served)["audit"].ok


async def test_paused_scheduling_is_told_and_no_failure(served: Served, core: LiveEngine) -> None:
    core.reporter.scheduling.changed("paused", time.monotonic())
    core.publish()
    await until(lambda: "paused" in parts(served)["engine"].detail, "not told")
    assert parts(served)["engine"].ok
    status = await status_of(served)
    assert (status.scheduling, status.requests.running) == ("paused", 2)
    assert status.fragmentation.sentence.startswith("PAUSED: vLLM schedules nothing ")


async def test_frames_that_stay_away_and_a_lost_engine_are_told_with_the_age(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: served.engine.flight.recording, "not recording")
    served.line.hangs = True
    monkeypatch.setattr(engine, "STALE_FRAME_S", 0.5)
    await until(lambda: not parts(served)["frames"].ok, "not noticed")
    assert "s old" in parts(served)["frames"].detail
    served.line.hangs, served.client.errored = False, True
    assert not parts(served)["engine"].ok
    async with httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.get("/vtoken/v1/status")
    assert answer.status_code == 503
    assert "the engine has stopped; its newest frame is" in answer.json()["detail"]
