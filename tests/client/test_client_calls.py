"""Every call of both clients against a real server on the real core."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

import vtoken.client
from tests.support.client_harness import Either
from tests.support.core.live import SESSION, LiveEngine
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S, until
from vtoken import wire
from vtoken.client import (
    AsyncClient,
    Client,
    NotApplied,
    NotVToken,
    OutcomeUnknown,
    ProblemError,
    RefusedError,
    RequestText,
    Server,
    Unauthorized,
    Unreachable,
    VTokenError,
    calls,
    request_text,
    sequences,
)
from vtoken.client.answers import PROBLEM_JSON, answer
from vtoken_api.bus import MAX_IN_FLIGHT


def test_the_public_names() -> None:
    assert sorted(vtoken.client.__all__) == [
        "AsyncClient",
        "AsyncStream",
        "Client",
        "NotApplied",
        "NotVToken",
        "OutcomeUnknown",
        "ProblemError",
        "RefusedError",
        "RequestText",
        "Server",
        "Stream",
        "StreamClosed",
        "StreamGap",
        "TLSFailed",
        "Unauthorized",
        "Unreachable",
        "VTokenError",
        "read_fleet",
    ]


def test_both_clients_have_every_call_with_its_parameters() -> None:
    makers = {
        name: make
        for module in (calls, sequences, request_text)
        for name, make in inspect.getmembers(module, inspect.isfunction)
        if make.__module__ == module.__name__ and not name.startswith("_")
    }
    del makers["looked_up"]  # both clients do it by themselves
    assert len(makers) == 29
    for name, make in makers.items():
        for client in (Client, AsyncClient):
            method = getattr(client, name)
            _, *parameters = inspect.signature(method).parameters.values()
            assert parameters == list(inspect.signature(make).parameters.values())
            assert method.__doc__ == make.__doc__
    assert str(inspect.signature(Client.audit)) == (
        "(self, /, limit: 'int' = 100) -> 'wire.AuditPage'"
    )


async def test_reading_calls_answer_what_the_core_says(either: Either, core: LiveEngine) -> None:
    status = await either.ask("status")
    assert (status.step, status.policy.name) == (core.runtime.step, "random")
    assert status.blocks.free == core.store.num_free_blocks()
    config = await either.ask("config")
    assert (config.revision, config.effective.budget_tokens) == (1, 64)
    policies = await either.ask("policies")
    assert {"h2o", "tova"} <= {policy.name for policy in policies}
    assert all(policy.params_schema["type"] == "object" for policy in policies)
    blocks = await either.ask("blocks")
    np.testing.assert_array_equal(blocks.live, core.reporter.live())
    np.testing.assert_array_equal(await either.ask("block_live"), core.reporter.live())
    block = await either.ask("block", core.store.tables["a"][0])
    assert [owner.request_id for owner in block.owners] == ["a"]
    assert sum(slot.state == "live" for slot in block.slots) == block.live
    assert {row.id for row in await either.ask("requests")} == {"a", "b"}
    assert (await either.ask("request", "a")).block_table == core.store.tables["a"]
    page = await either.ask("tokens", "a", 10, 5)
    assert [row.token_id for row in page.rows] == [10, 11, 12, 13, 14]
    assert page.total == 102


async def test_change_is_applied_audited_and_undone(either: Either, core: LiveEngine) -> None:
    result = await either.ask("patch_config", {"theta_f": 0.5}, revision=1)
    assert (result.revision, result.changes) == (2, {"theta_f": [0.25, 0.5]})
    undone = await either.ask("undo")
    assert (undone.revision, core.runtime.config.theta_f) == (3, 0.25)
    tried = await either.ask("patch_config", {"budget_tokens": 32}, validate_only=True)
    assert tried.what_if.evicted_tokens > 0
    assert core.runtime.config.budget_tokens == 64
    entries = (await either.ask("audit")).entries
    assert [entry.actor for entry in entries] == ["ana@127.0.0.1"] * 3


async def test_guards_are_sent_without_what_is_not_given(either: Either) -> None:
    guard = wire.Guard(metric="f", above=0.9)
    result = await either.ask("patch_config", {"theta_f": 0.5}, guards=[guard])
    assert result.trial.guards == [guard]


CHANGES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("patch_config", ({"theta_f": 0.5},)),
    ("undo", ()),
    ("compact", ()),
    ("forget", ("a", [(3, 9)])),
    ("end", ("stream",)),
    ("restore", ("a",)),
)


@pytest.mark.parametrize(("name", "arguments"), CHANGES)
@pytest.mark.parametrize("lost_at", ["engine", "server"])
async def test_change_without_an_answer_is_told_later(
    either: Either,
    served: Served,
    core: LiveEngine,
    name: str,
    arguments: tuple[Any, ...],
    lost_at: str,
) -> None:
    core.admit("stream", 20, rules=SESSION)
    core.call("patch_config", patch={"theta_f": 0.75})
    served.line.answers_late = True
    if lost_at == "engine":
        served.bus.timeout_s = 0.2
    else:
        either.client.timeout_s = 0.2
    with pytest.raises(OutcomeUnknown, match="applied") as lost:
        await either.ask(name, *arguments)
    with pytest.raises(OutcomeUnknown, match=r"nobody told within 0\.1 s.*GET /vtoken/v1/changes/"):
        await either.ask("wait_change", lost.value.change_id, timeout_s=0.1)
    served.bus.timeout_s, served.line.answers_late = LIMIT_S, False
    change = await either.ask("wait_change", lost.value.change_id)
    if lost_at == "server" and change.state == "not_applied":  # it was looked up before it came
        await until(lambda: any(c.change_id for c in served.line.calls), "it never came")
        assert core.runtime.revision == 2
        assert not core.runtime.operations.list_pending()
        return
    assert (change.id, change.state) == (lost.value.change_id, "applied")
    assert (change.operation is not None) is (name == "compact")
    assert (change.forgotten is not None) is (name == "forget")
    assert (change.ended is not None) is (name == "end")
    assert (change.restored is not None) is (name == "restore")
    assert core.runtime.revision == 2 + (name in ("patch_config", "undo"))


@pytest.mark.parametrize(("name", "arguments"), CHANGES)
async def test_client_that_looks_up_answers_late_what_was_done(
    either: Either, served: Served, core: LiveEngine, name: str, arguments: tuple[Any, ...]
) -> None:
    core.admit("stream", 20, rules=SESSION)
    core.call("patch_config", patch={"theta_f": 0.75})
    told: list[str] = []

    def tell(lost: OutcomeUnknown) -> None:
        told.append(lost.change_id)
        served.line.answers_late = served.line.hangs = False
        served.bus.timeout_s = LIMIT_S

    either.client.lookup_s, either.client.on_lookup = LIMIT_S, tell
    served.bus.timeout_s, served.line.answers_late = 0.2, True
    answer = await either.ask(name, *arguments)
    if isinstance(answer, wire.PatchResult):
        assert answer.revision == core.runtime.revision == 3
        assert answer.notes[-1].endswith(f"change {told[0]} was looked up: it is applied")
    elif isinstance(answer, wire.Forgotten):
        assert answer.spans == [(3, 9)]
        assert answer.notes[-1].endswith(f"change {told[0]} was looked up: it is applied")
    elif isinstance(answer, wire.Ended | wire.Restored):
        assert answer.request_id == arguments[0]
        assert answer.notes[-1].endswith(f"change {told[0]} was looked up: it is applied")
    else:
        assert core.runtime.operations.get(answer.id).actor == answer.actor
    revision = core.runtime.revision
    served.bus.timeout_s, served.line.hangs = 0.2, True
    with pytest.raises(ProblemError, match="nothing was done"):
        await either.ask(name, *arguments)
    assert core.runtime.revision == revision
    assert len(set(told)) == 2


async def test_change_that_did_not_reach_the_engine_is_an_error_that_says_so(
    either: Either, served: Served
) -> None:
    either.client.lookup_s = 30.0
    served.bus.timeout_s = 0.2
    slots = served.bus._slots
    for _ in range(MAX_IN_FLIGHT):
        await slots.acquire()

    def tell(_: OutcomeUnknown) -> None:
        for _ in range(MAX_IN_FLIGHT):
            slots.release()

    either.client.on_lookup = lambda lost: loop.call_soon_threadsafe(tell, lost)
    loop = asyncio.get_running_loop()
    with pytest.raises(NotApplied, match="nothing was changed"):
        await either.ask("undo")


@pytest.mark.usefixtures("stepping")
async def test_compaction_is_waited_for(either: Either) -> None:
    started = await either.ask("compact", request_id="a", batch_size=4)
    assert (started.request_id, started.batch_size) == ("a", 4)
    done = await either.ask("wait_operation", started.id)
    assert done.state == "done"
    assert done.result.freed_blocks > 0
    assert (await either.ask("operation", started.id)) == done


async def test_operation_that_does_not_end_is_answered_as_it_is(either: Either) -> None:
    started = await either.ask("compact")
    assert (await either.ask("wait_operation", started.id, timeout_s=0.05)).state == "pending"


async def test_all_pages_hold_every_token_once(either: Either) -> None:
    pages = await either.ask("token_pages", "a", limit=30)
    assert [len(page.rows) for page in pages] == [30, 30, 30, 12]
    assert [row.token_id for page in pages for row in page.rows] == list(range(102))


@pytest.mark.parametrize("num_events", [0, 3, 1500])
async def test_newest_events_come_over_all_pages(
    either: Either, core: LiveEngine, num_events: int
) -> None:
    for number in range(2000):
        core.runtime.events.add(0, "server", f"number {number}", {})
    newest = await either.ask("newest_events", num_events)
    assert [event.summary for event in newest] == [
        f"number {number}" for number in range(2000 - num_events, 2000)
    ]


async def test_a_text_is_read_anew_only_when_tokens_died(kind: Any, core: LiveEngine) -> None:
    text = RequestText("b")
    async with serve(core.handle, show_text=True) as served, Either(kind, Server(served.url)) as it:

        async def refresh(num_dead: int) -> list[int]:
            before = len(served.calls_of("text"))
            await it.ask("refresh_text", text, num_dead, 1)
            whole = core.reporter.tokens("b", 0, 4096).rows
            assert [row.token_id for row in text.tokens] == [row.token_id for row in whole]
            return [call.start for call in served.calls_of("text")[before:]]

        num_tokens, num_dead = (
            core.runtime.tables["b"].num_tokens,
            core.runtime.tables["b"].num_dead,
        )
        assert await refresh(num_dead) == [0]
        core.steps()
        assert await refresh(num_dead) == [num_tokens]
        assert await refresh(num_dead + 1) == [0]


# ---------------------------------------------------------------- refusals


async def test_refusal_carries_field_value_and_bound(either: Either, core: LiveEngine) -> None:
    with pytest.raises(ProblemError, match="theta_f") as refused:
        await either.ask("patch_config", {"batch_size": 4, "theta_f": 2})
    problem = refused.value.problem
    assert (problem.status, problem.field, problem.value) == (422, "theta_f", 2)
    assert problem.bound
    assert core.runtime.config.batch_size == 32
    for name, arguments, status in (
        ("request", ["no/body"], 404),
        ("block", [9999], 404),
        ("operation", ["../status"], 404),
        ("undo", [], 409),
    ):
        with pytest.raises(ProblemError) as refused:
            await either.ask(name, *arguments)
        assert refused.value.problem.status == status
        assert type(refused.value) is ProblemError


async def test_a_token_that_the_server_did_not_check_is_known(kind: Any, served: Served) -> None:
    for token in ("any", None):
        async with Either(kind, Server(served.url, token)) as either:
            await either.ask("status")
            async with either.stream() as streaming:
                await streaming.next()
                ignored = (either.client.token_ignored, streaming.stream.token_ignored)
        assert ignored == (token is not None,) * 2


async def test_missing_or_wrong_token_is_unauthorized(kind: Any, core: LiveEngine) -> None:
    async with serve(core.handle, api_key=["sesame"]) as served:
        for token in (None, "wrong"):
            async with Either(kind, Server(served.url, token)) as stranger:
                with pytest.raises(Unauthorized):
                    await stranger.ask("status")
        async with Either(kind, Server(served.url, "sesame")) as friend:
            assert (await friend.ask("status")).step == core.runtime.step


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("http://127.0.0.1:9", Unreachable, "connection refused"),
        ("{}/v1", NotVToken, "vToken is not enabled there"),
    ],
)
async def test_absent_server_and_strange_server_are_told_apart(
    kind: Any, served: Served, url: str, error: type[ProblemError], text: str
) -> None:
    async with Either(kind, Server(url.format(served.url))) as either:
        with pytest.raises(error, match=text):
            await either.ask("status")


async def test_answer_that_does_not_come_is_not_waited_for_longer_than_said(
    either: Either, served: Served
) -> None:
    served.line.hangs = True
    either.client.timeout_s = 0.2
    with pytest.raises(Unreachable, match=r"within 0.2 s"):
        await either.ask("status")
    served.line.hangs = False


async def test_answer_of_another_schema_is_not_taken(either: Either, core: LiveEngine) -> None:
    wrong = replace(calls.status(), decode=calls.events().decode)
    with pytest.raises(NotVToken, match="does not fit the schema"):
        await either.ask("send", wrong)


async def test_answer_that_nests_too_deep_is_not_taken(either: Either) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    headers = {"Content-Type": PROBLEM_JSON}
    for status in (200, 500):
        content = b'{"status":%d,"title":"","detail":"","value":%s}' % (status, deep)
        response = httpx.Response(status, headers=headers, content=content)
        with pytest.raises(NotVToken):
            answer(either.client.server, calls.status(), response)


async def test_no_proxy_is_asked_on_the_way_to_this_machine(
    either: Either, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert (await either.ask("status")).step == 3
    async with either.stream(["metrics"]) as streaming:
        assert isinstance(await streaming.next(), wire.Hello)


# ---------------------------------------------------------------- server


@pytest.mark.parametrize(
    ("server", "called", "streamed"),
    [
        ("http://h:1", "http://h:1/vtoken/v1/status", "ws://h:1/vtoken/v1/stream?fps=5"),
        ("h:1", "http://h:1/vtoken/v1/status", "ws://h:1/vtoken/v1/stream?fps=5"),
        ("https://h/", "https://h/vtoken/v1/status", "wss://h/vtoken/v1/stream?fps=5"),
        (
            "https://h/base",
            "https://h/base/vtoken/v1/status",
            "wss://h/base/vtoken/v1/stream?fps=5",
        ),
    ],
)
def test_addresses_keep_host_path_and_security(server: str, called: str, streamed: str) -> None:
    assert Server(server).call_url("/status") == called
    assert Server(server).stream_url({"fps": "5"}) == streamed


@pytest.mark.parametrize(
    "url",
    ["", "ws://h", "http://", "http://h:x", "http://u:secret@h", "http://h?t=1"],
)
def test_address_that_is_no_server_is_refused_without_telling_secrets(url: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Server(url)
    assert refused.value.field == "url"
    assert "secret" not in f"{refused.value}{refused.value.value}"
    assert isinstance(refused.value, VTokenError)


def test_token_comes_from_file_before_environment_and_is_never_shown(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTOKEN_URL", "http://there:1/")
    monkeypatch.setenv("VTOKEN_TOKEN", "sesame")
    server = Server.from_environment()
    assert (server.url, server.token) == ("http://there:1", "sesame")
    assert "sesame" not in repr(server) + server.stream_url({})
    assert server.headers()["Authorization"] == "Bearer sesame"
    file = tmp_path / "token"
    file.write_text("other\n")
    assert Server.from_environment("http://h", token_file=file).token == "other"
    with pytest.raises(RefusedError, match="cannot read the token file"):
        Server.from_environment(token_file=tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="characters"):
        Server("http://h", "päss")
