"""`vtoken mcp`: its tools on a real server, through the protocol's own client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from mcp import Client, StdioServerParameters

from tests.support.cli_harness import environment
from tests.support.core.live import LiveEngine
from tests.support.routes import token_files
from tests.support.served_core import serving, several
from tests.support.serving import Served
from vtoken import wire
from vtoken.cli.mcp_server import build
from vtoken.client import Server
from vtoken.sentences.situation import situation

READING = {
    "diagnosis", "status", "engines", "config", "policies", "requests", "events", "what_if",
}  # fmt: skip
CHANGING = {"change", "confirm", "undo", "compact", "restore"}


async def tools_of(client: Client) -> set[str]:
    return {tool.name for tool in (await client.list_tools()).tools}


async def call(client: Client, name: str, **arguments: Any) -> Any:
    """What a tool answers; fails if it is an error."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    (part,) = result.content
    assert part.type == "text"
    return json.loads(part.text)


async def refused(client: Client, name: str, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    assert result.is_error
    (part,) = result.content
    assert part.type == "text"
    return part.text


async def test_without_control_only_reading_tools_exist(served: Served, core: LiveEngine) -> None:
    async with Client(build(Server(served.url), can_control=False)) as client:
        assert await tools_of(client) == READING
        found = await call(client, "diagnosis")
        assert found["sentence"] == situation(core.reporter.status())
        assert found["violations"] == 0
        assert (await call(client, "config"))["desired"]["theta_f"] == 0.25
        assert {row["id"] for row in await call(client, "requests")} == {"a", "b"}
        planned = await call(client, "what_if", patch={"budget_tokens": 40})
        assert planned["what_if"]["evicted_tokens"] > 0
        assert core.runtime.config.budget_tokens == 64
        assert (await call(client, "events", kind="config")) == []


async def test_events_of_every_kind_are_found_behind_newer_ones_of_others(
    served: Served, core: LiveEngine
) -> None:
    kinds = get_args(wire.EventKind)
    for kind in kinds:
        core.runtime.events.add(core.runtime.step, kind, f"of {kind}", {})
    async with Client(build(Server(served.url), can_control=False)) as client:
        for kind in kinds:
            (found,) = await call(client, "events", kind=kind, limit=1)
            assert found["summary"] == f"of {kind}"
        assert [event["kind"] for event in await call(client, "events", limit=2)] == [*kinds[-2:]]


async def test_a_change_is_on_trial_and_is_confirmed_or_undone(
    served: Served, core: LiveEngine
) -> None:
    async with Client(build(Server(served.url, actor="agent"), can_control=True)) as client:
        assert await tools_of(client) == READING | CHANGING
        changed = await call(client, "change", patch={"theta_f": 0.5}, confirm_within_s=60)
        assert changed["trial"]["revision"] == changed["revision"]
        assert core.runtime.config.theta_f == 0.5
        await call(client, "confirm")
        assert core.controller.revisions.document().trial is None
        await call(client, "undo")
        assert core.runtime.config.theta_f == 0.25
        guards = [{"metric": "preemptions", "above": 0}]
        guarded = await call(client, "change", patch={"theta_f": 0.75}, guards=guards)
        assert guarded["trial"]["guards"][0]["metric"] == "preemptions"
    entries = (await served.service.journal.entries(10)).entries
    assert {entry.actor.partition("@")[0] for entry in entries} == {"agent"}


async def test_bad_input_is_a_clear_error_and_changes_nothing(
    served: Served, core: LiveEngine
) -> None:
    async with Client(build(Server(served.url), can_control=True)) as client:
        assert "theta_f" in await refused(client, "change", patch={"theta_f": 7})
        assert "guards" in await refused(client, "change", patch={}, guards=[{"above": 1}])
        assert "confirm_within_s" in await refused(client, "change", patch={}, confirm_within_s=0)
        assert "no engine 3" in await refused(client, "status", engine=3)
        assert core.runtime.revision == 1


async def test_engines_are_addressed_by_rank() -> None:
    async with several(2) as (served, cores):
        async with Client(build(Server(served.url), can_control=True)) as client:
            assert (await call(client, "engines"))["ok"]
            assert "several engines" in await refused(client, "status")
            assert (await call(client, "status", engine=1))["engine"] == 1
            await call(client, "change", patch={"theta_f": 0.5}, engine=1)
        assert [core.runtime.config.theta_f for core in cores] == [0.25, 0.5]


@pytest.mark.parametrize("has_token", [False, True])
async def test_the_command_serves_agents_on_standard_input(
    core: LiveEngine, tmp_path: Path, has_token: bool
) -> None:
    """On loopback anybody may change things, but an agent needs the token."""
    files = token_files(tmp_path, read=False, control=True)
    async with serving(core, **files) as served:
        arguments = ["-m", "vtoken.cli", "mcp", "--url", served.url]
        arguments += ["--token-file", files["control_token_file"]] if has_token else []
        command = StdioServerParameters(command=sys.executable, args=arguments, env=environment())
        async with Client(command) as client:
            assert await tools_of(client) == READING | (CHANGING if has_token else set())
            assert (await call(client, "config"))["revision"] == 1
