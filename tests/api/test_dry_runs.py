"""Dry runs with a read token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.core.live import LiveEngine
from tests.support.routes import CONTROL, READ, bearer, token_files
from tests.support.serving import Served, serve
from vtoken import wire
from vtoken_api.bus import MAX_IN_FLIGHT
from vtoken_api.limits import DRY_RUN_TIME, READ_TIME, Rate, RateLimits

REAL: list[tuple[str, str, Any]] = [
    ("PATCH", "/config", {"budget_tokens": 32}),
    ("PATCH", "/config?validate_only=false", {"budget_tokens": 32}),
    ("POST", "/undo", None),
    ("POST", "/confirm", None),
    ("POST", "/compactions", None),
    ("POST", "/compactions", {"dry_run": False}),
    ("POST", "/requests/a/forget", {"spans": [[0, 9]]}),
    ("POST", "/requests/a/end", None),
    ("POST", "/requests/a/restore", None),
]
DRY: list[tuple[str, str, Any]] = [
    ("PATCH", "/config?validate_only=true", {"budget_tokens": 32}),
    ("PATCH", "/config?validate_only=true&confirm_within_s=5", {"theta_f": 0.1}),
    ("POST", "/undo?validate_only=true", None),
    ("POST", "/compactions", {"dry_run": True}),
    ("POST", "/compactions", {"dry_run": True, "request_id": "a"}),
    ("POST", "/requests/a/restore?validate_only=true", None),
]


@pytest.fixture
async def guarded(core: LiveEngine, tmp_path: Path) -> AsyncIterator[Served]:
    """A server with a read and a control token and a change that can be undone."""
    files = token_files(tmp_path, read=True, control=True)
    async with serve(core.handle, **files) as served:
        yield served


@pytest.fixture
async def http(guarded: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=guarded.url + "/vtoken/v1") as http:
        changed = await http.patch("/config", json={"theta_f": 0.5}, headers=bearer(CONTROL))
        assert changed.status_code == 200
        yield http


async def call(
    http: httpx.AsyncClient, method: str, path: str, body: Any, token: str = READ
) -> httpx.Response:
    content = {} if body is None else {"json": body}
    return await http.request(method, path, headers=bearer(token), **content)


async def test_reader_tries_out_every_change_and_leaves_no_trace(
    guarded: Served, http: httpx.AsyncClient, core: LiveEngine
) -> None:
    before, revision = core.runtime.config, core.runtime.revision
    events, tables = core.runtime.events.last_seq, dict(core.store.tables)
    entries = (await guarded.service.journal.entries(100)).entries
    for method, path, body in DRY:
        answer = await call(http, method, path, body)
        assert answer.is_success, (path, answer.text)
        if path == "/compactions":
            operation = msgspec.json.decode(answer.content, type=wire.Operation)
            assert operation.dry_run
            assert operation.plan is not None
        elif "restore" in path:
            assert msgspec.json.decode(answer.content, type=wire.Restored).request_id == "a"
        else:
            result = msgspec.json.decode(answer.content, type=wire.PatchResult)
            assert (result.outcome, result.revision) == ("dry_run", revision)
            assert result.changes
            assert result.what_if is not None
    assert (core.runtime.config, core.runtime.revision) == (before, revision)
    assert (core.runtime.events.last_seq, core.store.tables) == (events, tables)
    assert not core.runtime.operations.list_pending()
    assert (await guarded.service.journal.entries(100)).entries == entries


async def test_reader_who_means_it_is_refused_before_the_engine_is_asked(
    guarded: Served, http: httpx.AsyncClient
) -> None:
    asked = len(guarded.line.calls)
    for method, path, body in REAL:
        answer = await call(http, method, path, body)
        assert answer.status_code == 403, path
        assert answer.json()["title"] == "Read-only"
        assert answer.headers["Content-Type"] == "application/problem+json"
    changed = {"patch_config", "undo", "confirm", "compact", "forget", "end", "restore"}
    assert not changed & {command.op for command in guarded.line.calls[asked:]}
    assert guarded.service.auth.refusals.counts[403] == len(REAL)


async def test_dry_run_is_refused_like_its_twin(http: httpx.AsyncClient) -> None:
    for path, body, status, field in (
        ("/config", {"theta_f": 2}, 422, "theta_f"),
        ("/config", {"budget": 2}, 422, "budget"),
        ("/confirm", None, 409, "confirm"),
    ):
        method = "PATCH" if path == "/config" else "POST"
        tried = await call(http, method, f"{path}?validate_only=true", body)
        meant = await call(http, method, path, body, CONTROL)
        assert (tried.status_code, tried.json()["field"]) == (status, field)
        assert tried.json() == meant.json()
    unclear = await call(http, "POST", "/undo?validate_only=1", None)
    assert (unclear.status_code, unclear.json()["field"]) == (422, "validate_only")
    stale = await http.post("/undo?validate_only=true", headers={**bearer(READ), "If-Match": '"9"'})
    assert stale.status_code == 412


async def test_dry_runs_spend_reads_and_leave_changes_to_those_who_make_them(
    guarded: Served, http: httpx.AsyncClient
) -> None:
    guarded.service.auth.limits = RateLimits({"change": Rate(0.001, 1), "read": Rate(0.001, 12)})
    tried = [(await call(http, *DRY[0])).status_code for _ in range(3)]
    assert tried == [200, 200, 429]
    guarded.service.auth.limits = RateLimits({"change": Rate(0.001, 1), "read": Rate(0.001, 12)})
    assert (await call(http, *DRY[0])).status_code == 200
    meant = [(await call(http, *REAL[0], CONTROL)).status_code for _ in range(2)]
    assert meant == [200, 429]


async def test_who_may_change_leaves_a_dry_entry_in_the_audit_log(
    guarded: Served, http: httpx.AsyncClient
) -> None:
    await call(http, "POST", "/undo?validate_only=true", None, CONTROL)
    entry = (await guarded.service.journal.entries(100)).entries[-1]
    assert (entry.action, entry.dry_run, entry.changes) == ("undo", True, {"theta_f": [0.5, 0.25]})


async def test_readers_who_used_their_share_of_the_engines_thread_are_refused(
    guarded: Served, http: httpx.AsyncClient
) -> None:
    """The first dry run is charged what the engine measured, and the next one finds the debt."""
    limits = guarded.service.auth.limits = RateLimits({DRY_RUN_TIME: Rate(1e-9, 1e-9)})
    assert (await call(http, *DRY[0])).status_code == 200
    asked = len(guarded.line.calls)
    for method, path, body in DRY:
        refused = await call(http, method, path, body)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json()["detail"] == (
            "dry runs of callers without control have used their share of the engine's thread"
        )
        assert refused.json()["bound"].startswith("1e-09 s of the engine's thread a second")
    assert len(guarded.line.calls) == asked
    assert guarded.service.auth.refusals.counts[429] == len(DRY)
    assert (await call(http, "GET", "/status", None)).status_code == 200
    assert (await call(http, *DRY[0], CONTROL)).status_code == 200
    assert (await call(http, *DRY[0], CONTROL)).status_code == 429
    assert (await call(http, *REAL[0], CONTROL)).status_code == 200
    assert len(limits) == 2


async def test_reads_have_a_share_of_their_own(guarded: Served, http: httpx.AsyncClient) -> None:
    guarded.service.auth.limits = RateLimits({READ_TIME: Rate(1e-9, 1e-9)})
    assert (await call(http, "GET", "/status", None)).status_code == 200
    refused = await call(http, "GET", "/requests", None)
    assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)
    assert (await call(http, *DRY[0])).status_code == 200
    assert (await call(http, "GET", "/requests", None, CONTROL)).status_code == 200


async def test_calls_that_wait_for_the_engine_pay_before_they_are_sent(
    guarded: Served, http: httpx.AsyncClient
) -> None:
    guarded.service.auth.limits = RateLimits({DRY_RUN_TIME: Rate(1e-9, 1e-9)})
    answers = await asyncio.gather(*[call(http, *DRY[0]) for _ in range(20)])
    codes = [answer.status_code for answer in answers]
    assert 0 < codes.count(200) <= MAX_IN_FLIGHT
    assert codes.count(200) + codes.count(429) == 20
