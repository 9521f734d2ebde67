"""Every REST route on the real core: its answers, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.support.core.live import SESSION, LiveEngine, make_quiet
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.client import calls
from vtoken.wire.routes import ROUTES
from vtoken_api.bus import MAX_IN_FLIGHT, MAX_WAITING
from vtoken_api.problems import PROBLEM_JSON

BASE = "/vtoken/v1"


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url + BASE) as http:
        yield http


def read(answer: httpx.Response, kind: Any) -> Any:
    """The document of a successful answer, decoded strictly."""
    assert answer.is_success, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    return msgspec.json.decode(answer.content, type=kind)


def problem(answer: httpx.Response, status: int) -> wire.Problem:
    """The problem document of a refused call."""
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == PROBLEM_JSON
    document = msgspec.json.decode(answer.content, type=wire.Problem)
    assert document.status == status
    assert document.title
    assert document.detail
    return document


# ---------------------------------------------------------------- reading


async def test_config_carries_its_revision_as_etag(http: httpx.AsyncClient) -> None:
    answer = await http.get("/config")
    config = read(answer, wire.ConfigDocument)
    assert answer.headers["ETag"] == f'"{config.revision}"'
    assert config.effective.budget_tokens == 64
    assert set(config.bounds) >= {"theta_f", "policy"}


async def test_blocks_as_json_and_as_octets_agree_with_the_core(
    http: httpx.AsyncClient, core: LiveEngine
) -> None:
    blocks = read(await http.get("/blocks"), wire.BlocksDocument)
    np.testing.assert_array_equal(blocks.live, core.reporter.live())
    np.testing.assert_array_equal(blocks.flags, core.reporter.flags())
    np.testing.assert_array_equal(blocks.owner, core.reporter.owner())
    answer = await http.get("/blocks", headers={"Accept": "application/octet-stream"})
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert list(answer.content) == list(blocks.live)


async def test_octets_saturate_at_255() -> None:
    core = make_quiet(num_blocks=8, block_size=512)
    core.admit("long", 700)
    core.steps()
    async with serve(core.handle) as served, httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.get(BASE + "/blocks", headers={"Accept": "application/octet-stream"})
    core.close()
    assert sorted(answer.content) == [0] * 6 + [188, 255]


async def test_a_finished_request_is_looked_up_by_id_alone(
    http: httpx.AsyncClient, core: LiveEngine
) -> None:
    before = read(await http.get("/requests/a"), wire.RequestDetail)
    core.finish("a")
    rows = read(await http.get("/requests"), list[wire.RequestRow])
    assert {row.id for row in rows} == {"b"}
    ended = read(await http.get("/requests/a"), wire.RequestDetail)
    assert (ended.state, ended.block_table, ended.blocks) == ("finished", [], 0)
    assert (ended.live, ended.dead) == (before.live, before.dead)
    assert before.dead > 0
    assert ended.ended_ts is not None
    assert (ended.evict_when, ended.given_tokens) == ("always", 0)
    unknown = problem(await http.get("/requests/c"), 404)
    assert "none of the newest 1,024 that finished" in str(unknown.detail)
    assert "1,024" in str(unknown.bound)
    gone = problem(await http.get("/requests/a/tokens"), 404)
    assert "has finished" in str(gone.detail)


@pytest.mark.parametrize(
    "own",
    ["tenant/42/7", "a/text", "a/tokens", "/", "..", ".", "ümlaut", "x y", "job%2F1", "a?b#c", "+"],
)
async def test_an_id_has_any_character_that_a_client_chose(
    http: httpx.AsyncClient, core: LiveEngine, own: str
) -> None:
    core.admit(f"chatcmpl-{own}-0a1b2c3d", 20)
    core.steps(2)
    for name in (own, f"chatcmpl-{own}", f"chatcmpl-{own}-0a1b2c3d"):
        detail = read(await http.get(calls.request(name).path), wire.RequestDetail)
        assert detail.id == f"chatcmpl-{own}-0a1b2c3d"
        page = read(await http.get(calls.tokens(name).path), wire.TokenPage)
        assert page.request_id == detail.id
        forget = calls.forget(name, [(5, 6)])
        reply = await http.post(forget.path, content=forget.content, headers=forget.headers)
        assert read(reply, wire.Forgotten).request_id == detail.id
    unquoted = problem(await http.get("/requests/tenant/42/7"), 404)
    assert unquoted.detail.endswith("write %2F for a / within an id")
    assert problem(await http.get(calls.text(own).path), 403).title == "Text is not shown"


async def test_a_bound_is_written_out_and_long_input_is_not(http: httpx.AsyncClient) -> None:
    refused = problem(await http.get("/events?after=-1"), 422)
    assert refused.detail == "after = '-1' is not an integer in 0..9007199254740991"
    answer = await http.patch("/config", json={"theta_f": "z" * 40_000, "y" * 10_000: 1})
    assert problem(answer, 422).field is not None
    assert len(answer.content) < 3_000
    answer = await http.get("/" + "z" * 40_000)
    assert problem(answer, 404).detail.endswith("zzz does not exist, see /docs")
    assert len(answer.content) < 2_000


async def test_every_answer_is_what_the_openapi_document_says(
    http: httpx.AsyncClient, served: Served, core: LiveEngine
) -> None:
    """Answers and problem documents of every GET route, checked by an independent validator."""
    document = served.app.openapi()
    operation = (await http.post("/compactions", json={"dry_run": True})).json()["id"]
    known = {"blocks": "3", "operations": operation, "changes": "a" * 8, "requests": "a"}
    for route in ROUTES:
        if route.changes:
            continue
        responses = document["paths"][BASE + route.path]["get"]["responses"]
        for value in (known.get(route.path.split("/")[1]), "99999999"):
            path = route.path.format(**dict.fromkeys(route.parameters, value))
            answer = await http.get(path)
            described = responses[str(answer.status_code)]["content"]
            schema = described[answer.headers["Content-Type"]]["schema"]
            if schema.get("format") == "binary":
                continue
            validator = Draft202012Validator({**schema, "components": document["components"]})
            validator.validate(answer.json())


# ---------------------------------------------------------------- changing


async def test_patch_is_in_force_and_audited(http: httpx.AsyncClient, core: LiveEngine) -> None:
    answer = await http.patch(
        "/config", json={"theta_f": 0.5, "batch_size": 7}, headers={"X-VToken-Actor": "ana"}
    )
    result = read(answer, wire.PatchResult)
    assert answer.headers["ETag"] == f'"{result.revision}"'
    assert result.changes == {"theta_f": [0.25, 0.5], "batch_size": [32, 7]}
    assert result.applied_at_step == core.runtime.step + 1
    assert core.runtime.config.theta_f == 0.5
    audit = read(await http.get("/audit"), wire.AuditPage)
    (entry,) = audit.entries
    assert entry.actor == "ana@127.0.0.1"
    assert entry.changes == result.changes
    assert entry.revision == result.revision
    assert not entry.dry_run


async def test_if_match_lets_only_the_current_revision_through(
    http: httpx.AsyncClient, core: LiveEngine
) -> None:
    tag = (await http.get("/config")).headers["ETag"]
    first = await http.patch("/config", json={"theta_f": 0.5}, headers={"If-Match": tag})
    assert first.status_code == 200
    stale = await http.patch("/config", json={"theta_f": 0.1}, headers={"If-Match": tag})
    assert problem(stale, 412).bound == "2"
    anyone = await http.patch("/config", json={"theta_f": 0.3}, headers={"If-Match": "*"})
    assert anyone.status_code == 200
    assert core.runtime.config.theta_f == 0.3


# ---------------------------------------------------------------- on trial

NO_PREEMPTIONS = 'guards=[{"metric":"preemptions","above":0}]'


async def actions(http: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Actor and action of every audit entry."""
    page = read(await http.get("/audit"), wire.AuditPage)
    return [(entry.actor.partition("@")[0], entry.action) for entry in page.entries]


async def test_a_change_on_trial_is_shown_confirmed_and_audited(http: httpx.AsyncClient) -> None:
    query = f"confirm_within_s=60&{NO_PREEMPTIONS}&guard_for_s=30"
    answer = await http.patch(f"/config?{query}", json={"theta_f": 0.5})
    trial = read(answer, wire.PatchResult).trial
    assert trial is not None
    assert trial.guards == [wire.Guard(metric="preemptions", above=0)]
    config = read(await http.get("/config"), wire.ConfigDocument)
    assert config.trial == trial
    assert (config.revision, config.effective_revision) == (2, 1)
    second = await http.patch("/config", json={"theta_f": 0.1})
    assert problem(second, 409).value == 2
    stale = await http.post("/confirm", headers={"If-Match": '"1"'})
    assert problem(stale, 412).bound == "2"
    answer = await http.post("/confirm", headers={"If-Match": '"2"', "X-VToken-Actor": "bob"})
    assert answer.headers["ETag"] == '"2"'
    assert read(answer, wire.PatchResult).trial is None
    assert problem(await http.post("/confirm"), 409).title == "Nothing on trial"
    assert (await actions(http))[-2:] == [("127.0.0.1", "trial"), ("bob", "confirm")]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("confirm_within_s=0", "confirm_within_s"),
        ("confirm_within_s=1.5", "confirm_within_s"),
        ("confirm_within_s=1e3", "confirm_within_s"),
        ("confirm_within_s=5&confirm_within_s=6", "confirm_within_s"),
        ("guard_preemptions=1", "guard_preemptions"),
        ("guards=preemptions", "guards"),
        ('guards=["preemptions"]', "guards"),
        ('guards=[{"metric":"preemptions","above":1}', "guards"),
        ('guards=[{"metric":"preemptions","above":"1"}]', "guards.above"),
        ('guards=[{"metric":"preemptions","more":1}]', "guards.more"),
        ('guards=[{"metric":"speed","above":1}]', "guards"),
        ("guard_for_s=60", "guard_for_s"),
    ],
)
@pytest.mark.parametrize("dry", ["", "&validate_only=true"])
async def test_bad_terms_of_a_trial_are_refused_and_change_nothing(
    http: httpx.AsyncClient, core: LiveEngine, query: str, field: str, dry: str
) -> None:
    answer = await http.patch(f"/config?{query}{dry}", json={"theta_f": 0.5})
    refused = problem(answer, 422)
    assert refused.field == field
    assert refused.bound
    assert core.runtime.revision == 1


# ---------------------------------------------------------------- compacting


async def test_compaction_is_accepted_followed_and_done(
    http: httpx.AsyncClient, core: LiveEngine
) -> None:
    held = core.runtime.tables.pool.num_used
    answer = await http.post("/compactions")
    assert answer.status_code == 202
    operation = read(answer, wire.Operation)
    assert operation.state == "pending"
    location = answer.headers["Location"]
    assert location == f"{BASE}/operations/{operation.id}"
    core.steps()
    done = read(await http.get(location.removeprefix(BASE)), wire.Operation)
    assert done.state == "done"
    assert done.result is not None
    assert done.result.freed_blocks == held - core.runtime.tables.pool.num_used == 3


# ---------------------------------------------------------------- sessions


async def test_a_session_is_ended_and_other_requests_are_not(
    http: httpx.AsyncClient, core: LiveEngine, served: Served
) -> None:
    core.admit("stream", 40, rules=SESSION)
    core.steps()
    status = read(await http.get("/status"), wire.Status)
    assert (status.requests.sessions, status.requests.session_blocks) == (1, 3)
    rows = read(await http.get("/requests"), list[wire.RequestRow])
    assert {row.id: row.session for row in rows} == {"a": False, "b": False, "stream": True}
    refused = await http.post("/requests/a/end")
    assert problem(refused, 409).title == "Not a session"
    ended = read(await http.post("/requests/stream/end"), wire.Ended)
    assert (ended.request_id, ended.freed_blocks) == ("stream", 3)
    assert "stream" not in core.runtime.tables
    detail = read(await http.get("/requests/stream"), wire.RequestDetail)
    assert detail.state == "finished"
    problem(await http.post("/requests/stream/end"), 404)
    (entry,) = read(await http.get("/audit"), wire.AuditPage).entries
    assert (entry.action, entry.changes) == ("end", {"request_id": [None, "stream"]})
    event = core.call("events", kind="server").events[-1]
    assert event.summary.endswith("ended session stream, which frees 3 blocks")
    await until(lambda: served.client.aborted == ["stream"], "its client was not told")


# ---------------------------------------------------------------- restoring


async def test_parked_tokens_of_a_request_come_back_when_they_are_asked_for(
    http: httpx.AsyncClient, core: LiveEngine
) -> None:
    core.configure(park_bytes=1 << 20, reclamation="auto")
    core.finish("a")
    core.finish("b")
    core.admit("p", 120)
    core.steps(3)
    core.configure(evict_when="pressure", restore_after_ms=3_600_000)
    row = read(await http.get("/requests/p"), wire.RequestDetail)
    assert row.parked_tokens == row.dead > 0
    tried = read(await http.post("/requests/p/restore?validate_only=true"), wire.Restored)
    assert (tried.parked_tokens, tried.restorable_tokens) == (row.dead, row.dead)
    assert not core.runtime.restorer.asked
    assert read(await http.post("/requests/p/restore"), wire.Restored) == tried
    core.steps(5)
    row = read(await http.get("/requests/p"), wire.RequestDetail)
    assert (row.dead, row.parked_tokens) == (0, 0)
    events = core.call("events", kind="restored").events
    assert sum(event.data["largest"]["p"] for event in events) == tried.parked_tokens
    assert events[-1].data["reason"] == "asked"
    dry, made = read(await http.get("/audit"), wire.AuditPage).entries
    changes = {"request_id": [None, "p"], "tokens": [None, tried.parked_tokens]}
    assert (dry.action, dry.dry_run, dry.changes) == ("restore", True, changes)
    assert (made.action, made.dry_run, made.changes) == ("restore", False, changes)
    refused = problem(await http.post("/requests/nobody/restore"), 404)
    assert refused.field == "request_id"
    assert problem(await http.post("/requests/p/restore?validate_only=1"), 422)


# ---------------------------------------------------------------- forgetting


@pytest.mark.parametrize(
    ("name", "body", "status", "field"),
    [
        ("nobody", {"spans": [[0, 1]]}, 404, "request_id"),
        ("b", {"spans": [[0, 1]]}, 404, "request_id"),  # it has finished
        ("a", {"spans": [[0, 103]]}, 422, "spans"),
        ("a", {"spans": [[1]]}, 422, "spans"),
        ("a", {"spans": [[0, 2.5]]}, 422, "spans"),
        ("a", {"spans": []}, 422, "spans"),
        ("a", {}, 422, "spans"),
        ("a", {"spans": [[0, 1]], "text": "x"}, 422, "text"),
        ("a", [[0, 1]], 422, None),
    ],
)
async def test_refused_spans_are_not_forgotten(
    http: httpx.AsyncClient,
    core: LiveEngine,
    name: str,
    body: Any,
    status: int,
    field: str | None,
) -> None:
    core.finish("b")
    refused = problem(await http.post(f"/requests/{name}/forget", json=body), status)
    assert refused.field == field
    assert ("has finished" in refused.detail) is (name == "b")
    assert core.runtime.requests.forgotten == {}


# ---------------------------------------------------------------- refusing

REFUSED_PATCHES: list[tuple[bytes, int, str | None]] = [
    (b'{"theta_f": ', 400, None),
    (b"", 400, None),
    (b'{"theta_f": NaN}', 400, None),
    (b'{"theta_f": 0.5, "theta_f": 0.6}', 400, None),
    (b'{"a": "\xff"}', 400, None),
    (b"[" * 60_000, 400, None),
    *(
        (b'{"theta_f":%b%b}' % (b"[" * depth, b"]" * depth), 400, None)
        for depth in (100, 955, 970, 1000, 30_000)
    ),
    (b'{"theta_f": "' + b"x" * 70_000 + b'"}', 413, None),
    (b"[]", 422, None),
    (b"null", 422, None),
    (b'{"theta_f": 1.5}', 422, "theta_f"),
    (b'{"batch_size": 123456789012345678901234567890}', 422, None),
    (b'{"theta": 0.5}', 422, "theta"),
    (b'{"policy": {"name": "lru"}}', 422, "policy.name"),
    (b'{"planner": "plug"}', 422, "planner"),
    (b'{"theta_f": 0.5, "batch_size": -1}', 422, "batch_size"),
]


@pytest.mark.parametrize(("body", "status", "field"), REFUSED_PATCHES)
async def test_refused_patch_names_the_field_and_changes_nothing(
    http: httpx.AsyncClient, core: LiveEngine, body: bytes, status: int, field: str | None
) -> None:
    before = core.runtime.config
    for url in ("/config", "/config?validate_only=true"):
        answer = await http.patch(
            url, content=body, headers={"Content-Type": "application/merge-patch+json"}
        )
        document = problem(answer, status)
        assert document.field == field
        assert status == 400 or document.bound
    assert core.runtime.config is before
    assert core.controller.runtime.revision == 1
    assert read(await http.get("/audit"), wire.AuditPage).entries == []


@pytest.mark.parametrize("tag", ["1", 'W/"1"', '"x"', '"1", "2"', ""])
async def test_malformed_if_match_is_refused(http: httpx.AsyncClient, tag: str) -> None:
    answer = await http.patch("/config", json={"theta_f": 0.5}, headers={"If-Match": tag})
    assert problem(answer, 400).field == "If-Match"


async def test_body_that_is_not_declared_as_json_is_refused(http: httpx.AsyncClient) -> None:
    form = {"Content-Type": "text/plain"}
    answer = await http.patch("/config", content=b'{"theta_f": 0.5}', headers=form)
    assert problem(answer, 415).field == "Content-Type"


@pytest.mark.parametrize(
    ("method", "path", "status", "field"),
    [
        ("GET", "/blocks/64", 404, "id"),
        ("GET", "/blocks/x", 422, "id"),
        ("GET", "/blocks/-1", 422, "id"),
        ("GET", "/requests/nobody", 404, "request_id"),
        ("GET", "/requests/nobody/tokens", 404, "request_id"),
        ("GET", "/requests/a/tokens?start=-1", 422, "start"),
        ("GET", "/requests/a/tokens?limit=5000", 422, "limit"),
        ("GET", "/operations/none", 404, "id"),
        ("GET", "/events?limit=0", 422, "limit"),
        ("GET", "/events?after=x", 422, "after"),
        ("GET", "/events?since=1", 422, "since"),
        ("GET", "/events?kind=x", 422, "kind"),
        ("GET", "/events?after=1&after=2", 422, "after"),
        ("GET", "/audit?limit=1.5", 422, "limit"),
        ("GET", "/status?x=1", 422, "x"),
        ("PATCH", "/config?validate_only=yes", 422, "validate_only"),
        ("PATCH", "/config?validateonly=true", 422, "validateonly"),
        ("GET", "/nowhere", 404, None),
        ("GET", "/", 404, None),
        ("GET", "/status/", 404, None),
        ("POST", "/status", 405, None),
        ("DELETE", "/config", 405, None),
        ("GET", "/undo", 405, None),
    ],
)
async def test_wrong_calls_get_problem_documents(
    http: httpx.AsyncClient, core: LiveEngine, method: str, path: str, status: int, field: str
) -> None:
    body = {"json": {"theta_f": 0.5}} if method == "PATCH" else {}
    answer = await http.request(method, path, **body)  # type: ignore[arg-type]
    assert problem(answer, status).field == field
    assert core.runtime.config.theta_f == 0.25


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"request_id": "nobody"}, 404, "request_id"),
        ({"batch_size": 0}, 422, "batch_size"),
        ({"dryrun": True}, 422, "dryrun"),
        ([], 422, None),
    ],
)
async def test_refused_compaction_starts_nothing(
    http: httpx.AsyncClient, core: LiveEngine, body: Any, status: int, field: str | None
) -> None:
    assert problem(await http.post("/compactions", json=body), status).field == field
    assert not core.runtime.operations.list_pending()


async def test_undo_with_a_body_is_refused(http: httpx.AsyncClient) -> None:
    assert problem(await http.post("/undo", json={"revision": 1}), 422).bound


# ---------------------------------------------------------------- a troubled engine


async def test_dead_engine_is_503_at_once(http: httpx.AsyncClient, served: Served) -> None:
    served.client.errored = True
    assert problem(await http.get("/status"), 503).title == "Engine unavailable"


async def test_silent_engine_is_503_and_a_call_that_nobody_waits_for_is_never_applied(
    http: httpx.AsyncClient, served: Served
) -> None:
    served.bus.timeout_s = 0.1
    served.line.hangs = True
    answer = await http.patch("/config", json={"theta_f": 0.5})
    assert "never will be" in problem(answer, 503).detail
    assert answer.headers["Retry-After"] == "1"


async def test_flood_of_calls_is_429_and_the_engine_sees_few_at_a_time(
    http: httpx.AsyncClient, served: Served
) -> None:
    served.bus.timeout_s = 1.0
    served.line.hangs = True
    served.line.calls.clear()
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(
        base_url=served.url + BASE, limits=limits, timeout=LIMIT_S
    ) as many:
        answers = await asyncio.gather(*(many.get("/status") for _ in range(80)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {429, 503}
    assert codes.count(429) >= 80 - MAX_WAITING
    assert codes.count(503) >= MAX_WAITING - MAX_IN_FLIGHT  # the hub's own calls wait, too
    assert served.line.most_awaited == MAX_IN_FLIGHT


async def test_fault_in_the_engine_is_500_and_says_where(
    http: httpx.AsyncClient, core: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("in the core")

    monkeypatch.setattr(core.reporter, "status", fail)
    document = problem(await http.get("/status"), 500)
    assert "in the core" in document.detail
    assert (await http.get("/config")).status_code == 200


async def test_fault_in_a_route_is_a_problem_document_too(
    http: httpx.AsyncClient,
    served: Served,
    server_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served.service, "journal", None)
    assert problem(await http.get("/audit"), 500).detail
    assert "AttributeError" in server_log.text
