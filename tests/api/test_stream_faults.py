"""Faults around the stream, on the real core: clocks that jump, an API server that is restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.wire import commands

DAY_S = 86_400.0
CONFIG = "/vtoken/v1/config"


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Shift the wall clock for all readers; monotonic clocks are unaffected."""
    real, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])

    def move(seconds: float) -> None:
        offset[0] += seconds

    return move


async def receive(stream: ClientConnection) -> Any:
    return msgspec.json.decode(
        await asyncio.wait_for(stream.recv(), LIMIT_S), type=wire.StreamMessage
    )


@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S])
async def test_wall_clock_that_jumps_stops_neither_stream_nor_changes(
    core: LiveEngine, served: Served, jump: Callable[[float], None], seconds: float
) -> None:
    async with (
        connect(served.stream_url + "?fps=30") as stream,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        seqs = [(await receive(stream)).seq for _ in range(2)]
        jump(seconds)
        changed = await http.patch(CONFIG, json={"theta_f": 0.5})
        assert changed.status_code == 200
        assert (await http.get("/vtoken/v1/status")).status_code == 200
        core.steps(3)
        kinds = set()
        while not {"event", "delta"} <= kinds:
            message = await receive(stream)
            kinds.add(message.__struct_config__.tag)
            seqs.append(message.seq)
        assert seqs == list(range(1, len(seqs) + 1))
        (entry,) = (await http.get("/vtoken/v1/audit")).json()["entries"]
        assert abs(entry["ts"] - time.time()) < 60
        jump(-seconds)
        assert (await http.patch(CONFIG, json={"theta_f": 0.25})).status_code == 200


async def test_call_that_the_clock_jumps_over_is_refused_as_a_whole_and_works_again(
    core: LiveEngine, jump: Callable[[float], None]
) -> None:
    def handle(command: commands.Command) -> wire.Reply:
        if command.op == "patch_config":
            jump(60.0)  # between the API server and the engine
        return core.handle(command)

    async with serve(handle) as served, httpx.AsyncClient(base_url=served.url) as http:
        before = (await http.get(CONFIG)).json()
        refused = await http.patch(CONFIG, json={"theta_f": 0.5})
        assert refused.status_code == 503
        assert "nothing was done" in refused.json()["detail"]
        after = (await http.get(CONFIG)).json()
        assert after["desired"] == before["desired"]
        assert after["revision"] == before["revision"]
        assert (await http.get("/vtoken/v1/audit")).json()["entries"] == []


async def test_client_of_a_restarted_api_server_misses_nothing(
    core: LiveEngine, tmp_path: Path
) -> None:
    async with (
        serve(core.handle, state_dir=str(tmp_path)) as first,
        httpx.AsyncClient(base_url=first.url) as http,
        connect(first.stream_url) as stream,
    ):
        hello, *_ = [await receive(stream) for _ in range(2)]
        await http.patch(CONFIG, json={"theta_f": 0.5})
        seen = 0
        while not seen:
            message = await receive(stream)
            seen = message.event.seq if isinstance(message, wire.EventMessage) else 0
    core.controller.patch_config({"theta_f": 0.75})  # while no API server runs
    newest = core.runtime.events.last_seq
    assert newest > seen
    async with serve(core.handle, state_dir=str(tmp_path)) as second:
        resume = f"?resume={hello.epoch}:{seen}"
        async with connect(second.stream_url + resume) as stream:
            again = await receive(stream)
            assert again.epoch == hello.epoch
            assert again.resumed
            missed = []
            while not missed or missed[-1] < newest:
                message = await receive(stream)
                if isinstance(message, wire.EventMessage):
                    missed.append(message.event.seq)
            assert missed == list(range(seen + 1, newest + 1))
        async with httpx.AsyncClient(base_url=second.url) as http:
            (entry,) = (await http.get("/vtoken/v1/audit")).json()["entries"]
            assert entry["changes"]["theta_f"][1] == 0.5
