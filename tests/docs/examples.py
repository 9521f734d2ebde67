"""The examples in the API descriptions: answers and messages of a real server.

The engine is the real core over a small pool (`make_quiet`), the server is the real plugin. The
clock stands still and ids come from a seed, so that every run makes the same examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

import vtoken_api.rest
from tests.support.core.live import HOLES, SESSION, LiveEngine, make_quiet
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.core.config.request_rules import RequestRules
from vtoken.wire.routes import ROUTES
from vtoken_api.rest.openapi import DOCUMENTED, document_of

FILE = Path(vtoken_api.rest.__file__).with_name("examples.json")
NOW = 1_767_225_600.0
PATCH = {"theta_f": 0.25, "policy": {"name": "streaming_llm"}}
COMPACTION = {"request_id": "cmpl-1", "batch_size": 8, "dry_run": True}
GUARD = {"metric": "preemptions", "above": 0}
FORGET = {"spans": [[12, 60]]}
IDS = {"block": "3", "change": "nightly-0001"}  # in the path, beside requests
PAGES = {
    "tokens": "?start=96&limit=4",
    "text": "?start=39&limit=5",
    "events": "?limit=4",
}
NAMED = {"X-VToken-Change": "nightly-0001"}
STREAM = "?topics=blocks,requests,events&fps=30"  # a status has an example of its own


async def make() -> str:
    """The contents of `FILE`: one line for each wire struct that is described."""
    with _stopped_clock():
        core = _engine()
        try:
            async with (
                serve(core.handle, show_text=True) as served,
                httpx.AsyncClient(base_url=served.url + "/vtoken/v1", timeout=LIMIT_S) as http,
            ):
                messages = await _messages(served, core)  # of the first configuration
                found = {**await _documents(http), **messages}
        finally:
            core.close()
    lines = [f'"{name}": {msgspec.json.encode(value).decode()}' for name, value in found.items()]
    text = re.sub(r'"waited_s":[-.e\d]+', '"waited_s":0.4', ",\n".join(lines))
    return "{\n" + text + "\n}\n"


@contextlib.contextmanager
def _stopped_clock() -> Iterator[None]:
    """Wall clock and performance counters stand still; the event loop's clock does not."""
    chance, by_chance = random.Random(0), uuid.uuid4

    def uuid4() -> uuid.UUID:
        caller = inspect.currentframe().f_back.f_globals["__name__"]  # type: ignore[union-attr]
        if not caller.startswith("vtoken"):
            return by_chance()  # libraries make ids too, not always as many
        return uuid.UUID(int=chance.getrandbits(128), version=4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: NOW)
        patch.setattr(time, "perf_counter", lambda: 0.0)
        patch.setattr(time, "perf_counter_ns", lambda: 0)
        patch.setattr(uuid, "uuid4", uuid4)
        yield


def _engine() -> LiveEngine:
    core = make_quiet(num_blocks=24)
    core.configure(**HOLES, shadow={"name": "streaming_llm"})
    core.admit("cmpl-1", 100)
    core.admit("cmpl-2", 80, rules=RequestRules(evict_when="pressure"))
    core.admit("stream-1", 20, rules=SESSION)
    core.steps(3)
    return core


async def _documents(http: httpx.AsyncClient) -> dict[str, Any]:
    """An answer or a body by the name of its struct; of a list, one item."""

    async def call(method: str, path: str, **more: Any) -> Any:
        answer = await http.request(method, path, **more)
        assert not answer.is_server_error, answer.text
        return answer.json()

    terms = {"confirm_within_s": 300, "guards": json.dumps([GUARD])}
    found = {
        "CompactionRequest": COMPACTION,
        "ForgetRequest": FORGET,
        "GuardParameter": GUARD,
        "PatchResult": await call("PATCH", "/config", params=terms, json=PATCH),
        "Problem": await call("PATCH", "/config", json={"theta_f": 1.5}),
        "Operation": await call("POST", "/compactions", json=COMPACTION),
        "Ended": await call("POST", "/requests/stream-1/end"),
        "Restored": await call("POST", "/requests/cmpl-1/restore"),
        "Forgotten": await call("POST", "/requests/cmpl-1/forget", json=FORGET, headers=NAMED),
    }
    for route in ROUTES:
        kind = document_of(route)
        if kind not in DOCUMENTED or kind.__name__ in found:
            continue
        path = route.path.format(**dict.fromkeys(route.parameters, IDS.get(route.name, "cmpl-1")))
        answer = await call("GET", f"{path}{PAGES.get(route.name, '')}")
        found[kind.__name__] = answer[0] if isinstance(answer, list) else answer
    _without_measurements(found["Status"])
    return found | {"Fleet": _without_states(found["Fleet"])}


def _without_states(fleet: dict[str, Any]) -> dict[str, Any]:
    """The engines without their statuses, which have an example of their own."""
    return fleet | {"engines": [row | {"status": None} for row in fleet["engines"]]}


def _without_measurements(status: dict[str, Any]) -> None:
    """Give a status latencies and ages that are the same in every run."""
    for part in status["health"]:
        part["detail"] = re.sub(r"[\d.]+ s old", "0.4 s old", part["detail"])
    for interval in ("ttft", "inter_token"):
        status["latency"][interval] |= {"p50_ms": 8.0, "p95_ms": 12.0, "p99_ms": 20.0}
    for peak in status["peaks"]:
        peak["value"] = 12.0 if peak["name"].endswith("_ms") else peak["value"]


async def _messages(served: Served, core: LiveEngine) -> dict[str, Any]:
    """A message by the name of its struct; `seq` counts them in this order."""
    await until(lambda: served.engine.flight.recording, "not recording")
    found: dict[str, Any] = {}
    async with asyncio.timeout(LIMIT_S), connect(served.stream_url + STREAM) as stream:
        while not {"hello", "snapshot", "event", "delta", "heartbeat"} <= set(found):
            message = msgspec.json.decode(await stream.recv())
            found.setdefault(message["type"], message)
            if message["type"] == "snapshot":
                core.call("compact", actor="ana", request_id="cmpl-2")
                core.admit("cmpl-3", 40)  # requests are in the next delta if one arrives
                core.steps()
    found["hello"]["policies"] = found["hello"]["policies"][:1]
    heartbeat = found["heartbeat"]
    found["dropped"] = {**heartbeat, "type": "dropped", "n": 2412}
    kinds = {
        "hello": wire.Hello,
        "snapshot": wire.Snapshot,
        "event": wire.EventMessage,
        "delta": wire.Delta,
        "heartbeat": wire.Heartbeat,
        "dropped": wire.Dropped,
    }
    messages = {
        kind.__name__: {**found[tag], "seq": number}
        for number, (tag, kind) in enumerate(kinds.items(), 1)
    }
    return {**messages, "AuthMessage": {"type": "auth", "token": "0123456789abcdef"}}
