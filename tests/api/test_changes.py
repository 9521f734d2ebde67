"""Changes whose answer is lost: what became of them is told, entered and never doubled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.core.live import LiveEngine
from tests.support.serving import Served
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.control import outcomes
from vtoken_api.bus import MAX_IN_FLIGHT

BASE = "/vtoken/v1"
CALLS = [
    ("PATCH", "/config", {"theta_f": 0.5}),
    ("POST", "/undo", None),
    ("POST", "/confirm", None),
    ("POST", "/compactions", {}),
    ("POST", "/requests/a/forget", {"spans": [[0, 9]]}),
]


@pytest.fixture
async def http(served: Served, core: LiveEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A change is on trial, so that every call of CALLS but the first is possible."""
    core.call("patch_config", patch={"theta_f": 0.75}, confirm_within_s=300)
    async with httpx.AsyncClient(base_url=served.url + BASE, timeout=LIMIT_S) as http:
        yield http


async def lost(http: httpx.AsyncClient, method: str, path: str, body: Any) -> wire.Problem:
    """The problem of a change whose answer does not come."""
    answer = await http.request(method, path, json=body)
    assert answer.status_code == 503
    return msgspec.json.decode(answer.content, type=wire.Problem)


async def outcome(http: httpx.AsyncClient, problem: wire.Problem) -> wire.Change:
    """What the call that `problem` names tells."""
    named = f"GET {BASE}/changes/{problem.change}"
    assert f"{named} tells which" in problem.detail
    answer = await http.get(f"/changes/{problem.change}")
    assert answer.status_code == 200, answer.text
    change = msgspec.json.decode(answer.content, type=wire.Change)
    assert change.id == problem.change
    return change


async def settled(http: httpx.AsyncClient, problem: wire.Problem) -> wire.Change:
    """The outcome once the engine has answered."""

    async def known() -> wire.Change | None:
        change = await outcome(http, problem)
        return None if change.state == "pending" else change

    change: wire.Change = await until(known, "still pending")
    return change


async def audited(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = (await http.get("/audit")).json()["entries"]
    return entries


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_change_that_was_applied_without_an_answer_is_told_and_audited(
    served: Served, core: LiveEngine, http: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    if path == "/config":
        core.call("undo")
    revision = core.runtime.revision
    served.bus.timeout_s, served.line.answers_late = 0.3, True
    problem = await lost(http, method, path, body)
    assert (await outcome(http, problem)).state == "pending"
    assert await audited(http) == []
    served.bus.timeout_s, served.line.answers_late = LIMIT_S, False
    change = await settled(http, problem)
    assert change.state == "applied"
    if path == "/compactions":
        assert change.operation is not None
        assert core.runtime.operations.get(change.operation.id).actor == change.operation.actor
    elif path.endswith("/forget"):
        assert change.forgotten is not None
        assert change.forgotten.spans == [(0, 9)]
    else:
        assert change.result is not None
        assert change.result.revision == core.runtime.revision
    assert core.runtime.revision == revision + (path in ("/config", "/undo"))
    (entry,) = await audited(http)
    assert entry["revision"] == core.runtime.revision


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_change_that_reached_the_engine_too_late_is_told_as_refused(
    served: Served, core: LiveEngine, http: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    revision, config = core.runtime.revision, core.runtime.config
    served.bus.timeout_s, served.line.hangs = 0.3, True
    problem = await lost(http, method, path, body)
    served.bus.timeout_s, served.line.hangs = LIMIT_S, False
    change = await settled(http, problem)
    assert change.state == "refused"
    assert change.problem is not None
    assert "nothing was done" in change.problem.detail
    assert (core.runtime.revision, core.runtime.config) == (revision, config)
    assert not core.runtime.operations.list_pending()
    assert core.runtime.requests.forgotten == {}
    assert await audited(http) == []


async def test_change_that_never_left_the_server_is_told_as_not_applied(
    served: Served, http: httpx.AsyncClient
) -> None:
    slots = served.bus._slots
    for _ in range(MAX_IN_FLIGHT):
        await slots.acquire()
    served.bus.timeout_s = 0.3
    problem = await lost(http, *CALLS[0])
    served.bus.timeout_s = LIMIT_S
    for _ in range(MAX_IN_FLIGHT):
        slots.release()
    assert (await settled(http, problem)).state == "not_applied"


async def test_callers_own_id_names_one_change_only(
    served: Served, core: LiveEngine, http: httpx.AsyncClient
) -> None:
    core.call("confirm")
    headers = {"X-VToken-Change": "nightly-2026-01"}
    applied = await http.patch("/config", json={"theta_f": 0.5}, headers=headers)
    assert applied.status_code == 200
    told = (await http.get("/changes/nightly-2026-01")).json()
    assert (told["state"], told["result"]) == ("applied", applied.json())
    again = await http.patch("/config", json={"theta_f": 0.25}, headers=headers)
    assert (again.status_code, again.json()["field"]) == (409, "X-VToken-Change")
    assert core.runtime.config.theta_f == 0.5
    dry = await http.patch("/config?validate_only=true", json={"theta_f": 0.1}, headers=headers)
    assert dry.status_code == 200
    for bad in ("short", "x" * 65, "a b c d e f"):
        headers = {"X-VToken-Change": bad}
        refused = await http.patch("/config", json={"theta_f": 0.25}, headers=headers)
        assert (refused.status_code, refused.json()["field"]) == (400, "X-VToken-Change")
    assert core.runtime.config.theta_f == 0.5


async def test_change_that_is_told_as_not_applied_is_not_applied_later(
    core: LiveEngine, http: httpx.AsyncClient
) -> None:
    core.call("confirm")
    revision = core.runtime.revision
    assert (await http.get("/changes/overtaken-01")).json()["state"] == "not_applied"
    headers = {"X-VToken-Change": "overtaken-01"}
    late = await http.patch("/config", json={"theta_f": 0.5}, headers=headers)
    assert (late.status_code, late.json()["field"]) == (409, "X-VToken-Change")
    assert "nothing was done" in late.json()["detail"]
    assert core.runtime.revision == revision
    assert (await http.get("/changes/overtaken-01")).json()["state"] == "not_applied"


async def test_id_of_a_change_that_waits_names_no_other(
    served: Served, core: LiveEngine, http: httpx.AsyncClient
) -> None:
    core.call("confirm")
    named = {"headers": {"X-VToken-Change": "still-waiting"}}
    served.bus.timeout_s, served.line.answers_late = 0.3, True
    first = await http.patch("/config", json={"theta_f": 0.5}, **named)
    again = await http.patch("/config", json={"theta_f": 0.25}, **named)
    served.line.answers_late = False
    assert (first.status_code, again.status_code) == (503, 409)
    assert core.runtime.config.theta_f == 0.5


async def test_reading_call_without_an_answer_names_no_change(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.bus.timeout_s, served.line.hangs = 0.3, True
    for answer in (
        await http.get("/status"),
        await http.patch("/config?validate_only=true", json={"theta_f": 0.5}),
    ):
        assert answer.status_code == 503
        assert answer.json()["change"] is None


def test_the_newest_outcomes_are_kept() -> None:
    kept = outcomes.Outcomes()
    for n in range(outcomes.MAX_KEPT + 1):
        kept.note(f"change-{n}", wire.Reply())
    assert kept.get("change-0").state == "not_applied"
    assert kept.get("change-1").state == "applied"
