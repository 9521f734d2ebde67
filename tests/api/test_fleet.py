"""A server with several engines: calls to one or to all, changes together, drift and its cure."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import websockets

from tests.support.core.live import LiveEngine
from tests.support.served_core import THETA_F, several
from tests.support.serving import Served
from tests.support.waiting import LIMIT_S, until
from vtoken import wire

BASE = "/vtoken/v1"
GUARD = 'guards=[{"metric":"preemptions","above":0}]'


@pytest.fixture
async def two() -> AsyncIterator[tuple[Served, list[LiveEngine]]]:
    async with several(2) as found:
        yield found


@pytest.fixture
async def served(two: tuple[Served, list[LiveEngine]]) -> Served:
    return two[0]


@pytest.fixture
async def cores(two: tuple[Served, list[LiveEngine]]) -> list[LiveEngine]:
    return two[1]


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url + BASE, timeout=LIMIT_S) as http:
        yield http


async def call(http: httpx.AsyncClient, kind: Any, method: str, path: str, **options: Any) -> Any:
    """The document of a call that succeeds."""
    answer = await http.request(method, path, **options)
    assert answer.is_success, answer.text
    return msgspec.json.decode(answer.content, type=kind)


async def refused(
    http: httpx.AsyncClient, status: int, method: str, path: str, **options: Any
) -> wire.Problem:
    answer = await http.request(method, path, **options)
    assert answer.status_code == status, answer.text
    return msgspec.json.decode(answer.content, type=wire.Problem)


async def patch(http: httpx.AsyncClient, query: str = "", **values: Any) -> wire.PatchResult:
    result: wire.PatchResult = await call(
        http, wire.PatchResult, "PATCH", f"/config{query}", json=values
    )
    return result


async def engines(http: httpx.AsyncClient) -> wire.Fleet:
    found: wire.Fleet = await call(http, wire.Fleet, "GET", "/engines")
    return found


def thetas(cores: list[LiveEngine]) -> list[float]:
    return [core.runtime.config.theta_f for core in cores]


def revisions(cores: list[LiveEngine]) -> list[int]:
    return [core.runtime.revision for core in cores]


# ---------------------------------------------------------------- addresses


async def test_a_change_is_made_on_all_engines_under_one_number(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    result = await patch(http, theta_f=0.5)
    assert result.engine is None
    assert [part.engine for part in result.engines] == [0, 1]
    assert thetas(cores) == [0.5, 0.5]
    assert revisions(cores) == [result.revision] * 2
    entries = (await served.service.journal.entries(10)).entries
    assert [(e.action, e.engine, e.revision) for e in entries] == [
        ("config", None, result.revision)
    ]
    for rank in (0, 1):
        config = await call(http, wire.ConfigDocument, "GET", f"/config?engine={rank}")
        assert (config.engine, config.desired.theta_f) == (rank, 0.5)
        status = await call(http, wire.Status, "GET", f"/status?engine={rank}")
        assert status.engine == rank


async def test_a_call_that_reads_one_engine_must_name_it(http: httpx.AsyncClient) -> None:
    for path in ("/status", "/config", "/blocks", "/blocks/1", "/requests", "/events"):
        found = await refused(http, 422, "GET", path)
        assert (found.field, found.value) == ("engine", None)
        assert found.bound is not None
        assert found.bound.startswith("0, 1;")


@pytest.mark.parametrize("rank", [2, 99])
async def test_an_engine_that_does_not_exist_is_refused(
    http: httpx.AsyncClient, cores: list[LiveEngine], rank: int
) -> None:
    for method, path in (
        ("GET", "/status"), ("GET", "/requests/r0"), ("PATCH", "/config"), ("POST", "/undo"),
        ("POST", "/compactions"), ("POST", "/sync"), ("GET", "/recording"),
    ):  # fmt: skip
        body = {"theta_f": 0.5} if method == "PATCH" else None
        found = await refused(http, 422, method, f"{path}?engine={rank}", json=body)
        assert (found.field, found.value) == ("engine", rank)
    assert thetas(cores) == [THETA_F] * 2


async def test_what_has_an_id_is_found_in_any_engine(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    for rank in (0, 1):
        detail = await call(http, wire.RequestDetail, "GET", f"/requests/r{rank}")
        assert detail.engine == rank
        page = await call(http, wire.TokenPage, "GET", f"/requests/r{rank}/tokens")
        assert (page.engine, page.request_id) == (rank, f"r{rank}")
    assert (await refused(http, 404, "GET", "/requests/r2")).field == "request_id"
    await refused(http, 404, "GET", "/requests/r1?engine=0")
    forgotten = await call(
        http, wire.Forgotten, "POST", "/requests/r1/forget", json={"spans": [[0, 4]]}
    )
    assert forgotten.engine == 1
    assert not cores[0].runtime.requests.forgotten
    for query in ("", "?validate_only=true"):
        restored = await call(http, wire.Restored, "POST", f"/requests/r1/restore{query}")
        assert (restored.engine, restored.request_id) == (1, "r1")
    await refused(http, 404, "POST", "/requests/r1/restore?engine=0")


async def test_one_request_of_all_engines_is_meant_by_a_name(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    cores[0].admit("chatcmpl-job-1-2-0a1b2c3d", 20)
    cores[1].admit("chatcmpl-job-1-4e5f6a7b", 20)
    for rank, own in enumerate(("job-1-2", "job-1")):
        cores[rank].steps(2)
        for name in (own, f"chatcmpl-{own}"):
            assert (await call(http, wire.RequestDetail, "GET", f"/requests/{name}")).engine == rank
            page = await call(http, wire.TokenPage, "GET", f"/requests/{name}/tokens")
            assert page.engine == rank
            body = {"request_id": name, "dry_run": True}
            planned = await call(http, wire.Operation, "POST", "/compactions", json=body)
            assert (planned.engine, planned.request_id) == (rank, page.request_id)
    cores[0].admit("0_chatcmpl-job-1-5f6a7b8c", 20)
    cores[0].steps(2)
    forget = {"json": {"spans": [[0, 4]]}}
    found = await refused(http, 409, "POST", "/requests/job-1/forget", **forget)
    assert found.title == "Several requests"
    listed = "0_chatcmpl-job-1-5f6a7b8c, chatcmpl-job-1-4e5f6a7b"
    assert found.detail == f"'job-1' names 2 requests: {listed}"
    assert not any(core.runtime.requests.forgotten for core in cores)
    cores[0].finish("0_chatcmpl-job-1-5f6a7b8c")
    forgotten = await call(http, wire.Forgotten, "POST", "/requests/job-1/forget", **forget)
    assert (forgotten.engine, forgotten.request_id) == (1, "chatcmpl-job-1-4e5f6a7b")
    unknown = await refused(http, 404, "GET", "/requests/job")
    assert "ids that begin with it: " in unknown.detail


async def test_a_compaction_runs_on_all_or_where_its_request_is(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    operation = await call(http, wire.Operation, "POST", "/compactions")
    assert [part.engine for part in operation.engines] == [0, 1]
    for core in cores:
        core.steps(2)
    done = await call(http, wire.Operation, "GET", f"/operations/{operation.id}")
    assert done.state == "done"
    assert done.result is not None
    parts = [part.result for part in done.engines if part.result is not None]
    assert done.result.moved_tokens == sum(part.moved_tokens for part in parts) > 0
    one = await call(http, wire.Operation, "POST", "/compactions", json={"request_id": "r1"})
    assert one.engine == 1


async def test_a_stream_is_of_one_engine(served: Served) -> None:
    for rank in (0, 1):
        url = f"{served.stream_url}?engine={rank}&topics=metrics"
        async with websockets.connect(url) as stream:
            hello = msgspec.json.decode(await stream.recv(), type=wire.StreamMessage)
            snapshot = msgspec.json.decode(await stream.recv(), type=wire.StreamMessage)
        assert isinstance(hello, wire.Hello)
        assert (hello.engine, hello.engines, hello.epoch) == (rank, [0, 1], f"e{rank}")
        assert isinstance(snapshot, wire.Snapshot)
        assert snapshot.status is not None
        assert snapshot.status.engine == snapshot.config.engine == rank
    with pytest.raises(websockets.InvalidStatus) as error:
        await websockets.connect(f"{served.stream_url}?engine=2")
    assert error.value.response.status_code == 422


async def test_metrics_have_the_engine_as_a_label(http: httpx.AsyncClient, served: Served) -> None:
    text = (await http.get(served.url + "/metrics")).text
    for rank in (0, 1):
        assert f'vllm:vtoken_up{{engine="{rank}",model_name="scripted"}} 1.0' in text
    assert text.count("vllm:vtoken_server_audit_failing{") == 1


async def test_every_engine_has_a_recording(http: httpx.AsyncClient, served: Served) -> None:
    for engine in served.service.engines.values():
        await until(lambda engine=engine: engine.flight.recording, "not recording")
    await refused(http, 422, "GET", "/recording")
    await patch(http, "?engine=1", theta_f=0.5)
    for rank, name in ((0, "flight"), (1, "flight-1")):
        assert (await http.get(f"/recording?engine={rank}")).is_success
        folder = served.service.journal.flights[rank].segments.directory
        assert folder.name == name
        assert list(folder.iterdir())


# ---------------------------------------------------------------- changes together


async def test_a_dry_run_adds_the_effects_up_and_changes_nothing(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    result = await patch(http, "?validate_only=true", budget_tokens=40, interval_tokens=1)
    parts = [part.what_if for part in result.engines if part.what_if is not None]
    assert result.what_if is not None
    assert result.what_if.evicted_tokens == sum(part.evicted_tokens for part in parts)
    assert all(part.evicted_tokens > 0 for part in parts)
    assert revisions(cores) == [1, 1]


async def test_if_match_is_held_against_the_newest_revision(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    newest = (await patch(http, "?engine=1", theta_f=0.5)).revision
    for stale in (newest - 1, newest + 1):
        headers = {"If-Match": f'"{stale}"'}
        await refused(http, 412, "PATCH", "/config", json={"theta_f": 0.75}, headers=headers)
    assert thetas(cores) == [THETA_F, 0.5]
    headers = {"If-Match": f'"{newest}"'}
    result = await call(
        http, wire.PatchResult, "PATCH", "/config", json={"theta_f": 0.75}, headers=headers
    )
    assert revisions(cores) == [result.revision] * 2


async def test_a_value_that_one_engine_refuses_changes_none(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    found = await refused(http, 422, "PATCH", "/config", json={"theta_f": 7})
    assert found.field == "theta_f"
    assert thetas(cores) == [THETA_F] * 2


async def test_a_trial_on_one_engine_keeps_the_others_from_a_change(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    await patch(http, "?engine=1&confirm_within_s=300", theta_f=0.5)
    found = await refused(http, 409, "PATCH", "/config", json={"batch_size": 7})
    assert found.detail.startswith("engine 1: revision")
    assert [core.runtime.config.batch_size == 7 for core in cores] == [False, False]
    assert cores[0].runtime.revision == 1
    entries = (await served.service.journal.entries(10)).entries
    assert [entry.action for entry in entries] == ["trial"]


async def test_an_engine_that_does_not_answer_stops_the_change(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    served.service.fleet.one(1).timeout_s = 0.2
    served.client.engines[1].hangs = True
    found = await refused(http, 503, "PATCH", "/config", json={"theta_f": 0.5})
    assert found.detail.startswith("engine 1: ")
    assert thetas(cores) == [THETA_F] * 2
    served.client.engines[1].hangs = False


async def test_a_change_that_reaches_one_engine_too_late_is_taken_back_on_the_others(
    http: httpx.AsyncClient,
    cores: list[LiveEngine],
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engine 1 would make the change, and hangs when engine 0 has made it."""
    for engine in served.service.fleet.engines:
        engine.timeout_s = 0.3
    first, other = served.client.engines
    deliver = first.answer

    def answer(payload: bytes) -> bytes:
        answer = deliver(payload)
        other.hangs = first.calls[-1].change_id is not None
        return answer

    monkeypatch.setattr(first, "answer", answer)
    found = await refused(http, 503, "PATCH", "/config", json={"theta_f": 0.5})
    assert (found.title, thetas(cores)) == ("Outcome unknown", [0.5, THETA_F])
    other.hangs = False
    await until(lambda: thetas(cores) == [THETA_F] * 2, "engine 0 keeps the change")
    assert (await served.service.journal.entries(10)).entries == []


async def test_an_undo_that_would_restore_different_things_is_refused(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    await patch(http, theta_f=0.5)
    await patch(http, "?engine=1", batch_size=9)
    found = await refused(http, 409, "POST", "/undo")
    assert "engine 1: batch_size 9 ->" in found.detail
    assert thetas(cores) == [0.5, 0.5]
    await call(http, wire.PatchResult, "POST", "/undo?engine=1")
    await call(http, wire.PatchResult, "POST", "/undo")
    assert thetas(cores) == [THETA_F] * 2
    assert len(set(revisions(cores))) == 1


async def test_one_engines_guard_reverts_the_trial_of_all(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    result = await patch(http, f"?{GUARD}&guard_for_s=300", theta_f=0.5)
    assert result.trial is not None
    assert result.trial.engines == [0, 1]
    cores[1].runtime.counters.requests.preempted += 1
    cores[1].steps(1)
    assert thetas(cores)[1] == THETA_F
    await until(lambda: thetas(cores) == [THETA_F] * 2, "engine 0 keeps the trial")
    assert len(set(revisions(cores))) == 1

    async def both_entered() -> bool:
        entries = (await served.service.journal.entries(10)).entries
        return [(e.action, e.actor, e.engine) for e in entries[1:]] == [
            ("revert", "guard", 1),
            ("revert", "guard of engine 1", 0),
        ]

    await until(both_entered, "the reverts are not in the audit log")


async def test_a_trial_of_one_engine_reverts_alone(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    await patch(http, theta_f=0.5)
    await patch(http, f"?engine=1&{GUARD}&guard_for_s=300", batch_size=9)
    cores[1].runtime.counters.requests.preempted += 1
    cores[1].steps(1)
    assert cores[1].runtime.config.batch_size != 9

    async def entered() -> bool:
        page = await call(http, wire.AuditPage, "GET", "/audit")
        return any(entry.action == "revert" for entry in page.entries)

    await until(entered, "the revert is not in the audit log")
    assert thetas(cores) == [0.5, 0.5]


async def test_confirming_keeps_the_trial_of_all(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    await patch(http, "?confirm_within_s=300", theta_f=0.5)
    await call(http, wire.PatchResult, "POST", "/confirm")
    for core in cores:
        assert core.controller.revisions.document().trial is None
    assert thetas(cores) == [0.5, 0.5]


# ---------------------------------------------------------------- one engine first


async def entries_of(served: Served) -> list[tuple[str, str, int | None]]:
    entries = (await served.service.journal.entries(20)).entries
    return [(e.action, e.actor, e.engine) for e in entries]


HELD = f"{GUARD}&guard_for_s=1"
CANARY = "?canary_engine=1"


async def test_others_follow_one_engine_when_its_guards_have_held(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    async with cores[1].stepping():
        result = await patch(http, f"{CANARY}&{HELD}", theta_f=0.5)
        assert (result.engine, thetas(cores)) == (1, [THETA_F, 0.5])
        assert result.trial is not None
        assert result.trial.followers == [0]
        await until(lambda: thetas(cores) == [0.5, 0.5], "engine 0 does not follow")
    assert revisions(cores) == [result.revision] * 2

    async def entered() -> bool:
        return await entries_of(served) == [
            ("trial", "127.0.0.1", 1),
            ("keep", "guard", 1),
            ("rollout", "guard of engine 1", 0),
        ]

    await until(entered, "the rollout is not in the audit log")
    assert (await engines(http)).ok


async def test_engine_whose_guard_is_crossed_is_followed_by_none(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    await patch(http, f"{CANARY}&{GUARD}&guard_for_s=300", theta_f=0.5)
    cores[1].runtime.counters.requests.preempted += 1
    cores[1].steps(1)

    async def entered() -> bool:
        return (await entries_of(served))[1:] == [("revert", "guard", 1)]

    await until(entered, "the revert is not in the audit log")
    assert thetas(cores) == [THETA_F] * 2
    assert revisions(cores)[0] == 1


async def test_change_that_the_others_cannot_follow_is_taken_back_everywhere(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    """Engine 0 has a trial of its own when the canary's ends."""
    async with cores[1].stepping():
        await patch(http, f"{CANARY}&{HELD}", theta_f=0.5)
        await patch(http, "?engine=0&confirm_within_s=300", batch_size=9)

        async def entered() -> bool:
            return (await entries_of(served))[-1] == ("revert", "guard of engine 1", 1)

        await until(entered, "engine 1 keeps the change")
    assert thetas(cores) == [THETA_F] * 2


async def test_guard_without_evidence_lets_nobody_follow(
    http: httpx.AsyncClient, cores: list[LiveEngine], served: Served
) -> None:
    guard = '{"metric":"latency_seconds{kind=inter_token,quantile=0.95}","above":0.05}'
    await patch(http, f"{CANARY}&guards=[{guard}]&guard_for_s=1", theta_f=0.5)

    async def entered() -> bool:
        return (await entries_of(served))[1:] == [
            ("keep", "guard", 1),
            ("revert", "guard of engine 1", 1),
        ]

    await until(entered, "engine 1 keeps the change")
    assert thetas(cores) == [THETA_F] * 2


async def test_others_follow_a_trial_that_is_confirmed(
    http: httpx.AsyncClient, cores: list[LiveEngine]
) -> None:
    await patch(http, f"{CANARY}&{HELD}&confirm_within_s=300", theta_f=0.5)
    await call(http, wire.PatchResult, "POST", "/confirm?engine=1")
    await until(lambda: thetas(cores) == [0.5, 0.5], "engine 0 does not follow")


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("canary_engine=1", 1),
        ("canary_engine=1&confirm_within_s=60", 1),
        (f"canary_engine=1&engine=1&{HELD}", 1),
        (f"canary_engine=x&{HELD}", "x"),
    ],
)
async def test_canary_engine_that_cannot_decide_is_refused(
    http: httpx.AsyncClient, cores: list[LiveEngine], query: str, value: Any
) -> None:
    found = await refused(http, 422, "PATCH", f"/config?{query}", json={"theta_f": 0.5})
    assert (found.field, found.value) == ("canary_engine", value)
    assert thetas(cores) == [THETA_F] * 2


async def test_canary_engine_of_a_server_with_one_engine_is_refused() -> None:
    async with (
        several(1) as (served, cores),
        httpx.AsyncClient(base_url=served.url + BASE, timeout=LIMIT_S) as http,
    ):
        path = f"/config?canary_engine=0&{HELD}"
        found = await refused(http, 422, "PATCH", path, json={"theta_f": 0.5})
        assert "one engine" in found.detail
        assert thetas(cores) == [THETA_F]


# ---------------------------------------------------------------- agreement


async def test_drift_is_shown_and_one_call_ends_it() -> None:
    async with (
        several(3) as (served, cores),
        httpx.AsyncClient(base_url=served.url + BASE, timeout=LIMIT_S) as http,
    ):
        found = await engines(http)
        assert found.ok
        assert found.sentence == "3 engines, all answer and run the same configuration"
        newest = (await patch(http, "?engine=1", theta_f=0.5)).revision
        found = await engines(http)
        assert (found.ok, found.revision) == (False, newest)
        assert [row.drift for row in found.engines] == [
            {},
            {"theta_f": [0.5, THETA_F]},
            {},
        ]
        assert re.sub(r"\d+ s ago", "just now", found.sentence) == (
            "127.0.0.1 changed theta_f on engine 1 only, just now: "
            "vtoken sync --engine 1, or vtoken undo --engine 1"
        )
        planned = await call(http, wire.PatchResult, "POST", "/sync?engine=1&validate_only=true")
        assert [part.engine for part in planned.engines] == [0, 2]
        await call(http, wire.PatchResult, "POST", "/sync?engine=1")
        assert thetas(cores) == [0.5] * 3
        assert (await engines(http)).ok
        await patch(http, "?engine=2", batch_size=9)
        healed = await call(http, wire.PatchResult, "POST", "/sync")
        assert healed.engine == 2
        assert cores[2].runtime.config.batch_size != 9
        await refused(http, 409, "POST", "/sync")


async def test_a_silent_engine_is_a_row_that_says_so(
    http: httpx.AsyncClient, served: Served
) -> None:
    hub = served.service.engine(1).hub
    await until(lambda: hub.state is not None, "the engine's state is not known")
    served.service.fleet.one(1).timeout_s = 0.1
    served.client.engines[1].hangs = True

    async def silent() -> wire.Fleet | None:
        found = await engines(http)
        return found if found.engines[1].problem else None

    found = await until(silent, "engine 1 seems to answer")
    assert found.engines[0].problem == ""
    assert found.engines[1].status is not None
    assert found.sentence.startswith("engine 1 does not answer")
    status = await call(http, wire.Status, "GET", "/status?engine=0")
    assert status.engine == 0
    assert (await call(http, wire.RequestDetail, "GET", "/requests/r0")).engine == 0
    assert "engine did not answer" in (await refused(http, 503, "GET", "/requests/r9")).detail
    served.client.engines[1].hangs = False
