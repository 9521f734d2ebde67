"""The health of the server's parts, in status and stream."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.waiting import until
from vtoken import wire
from vtoken_api import health
from vtoken_api.state.statedir import StateDir


def parts(served: Served) -> dict[str, wire.Health]:
    return {part.name: part for part in served.service.health()}


async def status_of(served: Served) -> wire.Status:
    async with httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.get("/vtoken/v1/status")
        assert answer.status_code == 200
        return msgspec.json.decode(answer.content, type=wire.Status)


async def test_status_names_every_part_and_all_are_ok(served: Served) -> None:
    await until(lambda: served.service.flight.recording, "not recording")
    health = (await status_of(served)).health
    assert [part.name for part in health] == ["engine", "frames", "audit", "recorder"]
    assert all(part.ok and part.detail and part.since_ts is None for part in health)


async def test_dead_recorder_is_in_status_and_stream_with_its_fault_and_time(
    core: LiveEngine, tmp_path: Path
) -> None:
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        flight = served.service.flight
        flight._retry_s = 0.05
        await until(lambda: flight.recording, "not recording")
        folder = flight.segments.directory
        folder.rename(tmp_path / "away")
        folder.write_text("a file where the directory was")
        flight._ends_at = 0.0  # the next segment cannot be opened
        await until(lambda: not parts(served)["recorder"].ok, "not noticed")
        (dead,) = [part for part in (await status_of(served)).health if not part.ok]
        assert (dead.name, dead.detail.partition(":")[0]) == ("recorder", "stopped")
        assert dead.since_ts == pytest.approx(flight.stopped_ts)
        async with connect(served.stream_url + "?topics=metrics") as stream:
            shown: dict[str, bool] = {}
            while shown.get("recorder") is not False:  # a frame says how it was when it came
                message = msgspec.json.decode(await asyncio.wait_for(stream.recv(), 60))
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
        await served.service.audit.probe()
        audit = parts(served)["audit"]
        assert not audit.ok
        assert "Is a directory" in audit.detail
        assert audit.since_ts == pytest.approx(time.time(), abs=60)
        (tmp_path / "audit.jsonl").unlink()
        await served.service.audit.probe()
        assert parts(served)["audit"].ok


async def test_recorder_of_another_process_is_judged_by_what_it_writes(
    core: LiveEngine, tmp_path: Path
) -> None:
    state = {"state_dir": str(tmp_path)}
    async with serve(core.handle, **state) as one:
        await until(lambda: one.service.flight.recording, "not recording")
        async with serve(core.handle, **state) as two:
            await until(lambda: two.service.flight.peer_silent_s is not None, "peer not seen")
            recorder = parts(two)["recorder"]
            assert recorder.ok
            assert "another process of this server records" in recorder.detail
            two.service.flight._peer_wrote_ts = time.time() - health.STALE_PEER_S - 5
            assert not parts(two)["recorder"].ok


async def test_paused_scheduling_is_told_and_no_failure(served: Served, core: LiveEngine) -> None:
    core.reporter.scheduling.changed("paused", time.monotonic())
    core.publish()
    await until(lambda: "paused" in parts(served)["engine"].detail, "not told")
    assert parts(served)["engine"].ok
    status = await status_of(served)
    assert (status.scheduling, status.requests.running) == ("paused", 2)
    assert status.fragmentation.sentence.startswith("Paused: vLLM schedules nothing ")


async def test_peer_that_has_not_written_yet_is_given_the_time_to(
    core: LiveEngine, tmp_path: Path
) -> None:
    leader = StateDir(tmp_path)
    assert leader.try_lead()
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        flight = served.service.flight
        await until(lambda: flight.peer_silent_s is not None, "peer not seen")
        assert flight._peer_wrote_ts == flight._started_ts
        flight._peer_wrote_ts = time.time()
        assert parts(served)["recorder"].ok
    leader.close()


async def test_time_of_the_peers_last_write_is_that_of_its_newest_segment(
    served: Served,
) -> None:
    segments = served.service.flight.segments
    await until(segments.listed, "no segment")
    await served.service.flight.close()
    (segment,) = segments.listed()
    os.utime(segment.path, (1000.0, 1000.0))
    assert segments.newest_write_ts() == 1000.0


async def test_frames_that_stay_away_and_a_lost_engine_are_told_with_the_age(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: served.service.flight.recording, "not recording")
    served.client.hangs = True
    monkeypatch.setattr(health, "STALE_FRAME_S", 0.5)
    await until(lambda: not parts(served)["frames"].ok, "not noticed")
    assert "s old" in parts(served)["frames"].detail
    served.client.hangs, served.client.errored = False, True
    assert not parts(served)["engine"].ok
    async with httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.get("/vtoken/v1/status")
    assert answer.status_code == 503
    assert "the engine has stopped; its newest frame is" in answer.json()["detail"]
