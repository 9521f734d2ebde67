"""The Model Context Protocol server of `vtoken mcp`: its tools are calls of the typed client.

Without control only tools that read exist. Every change is on trial: the engine reverts it unless
the agent, or a person, confirms it in time.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from vtoken import __version__, wire
from vtoken.cli.errors import failure_of
from vtoken.cli.streaming import EVERY_EVENT
from vtoken.client import AsyncClient, ProblemError, Server

INSTRUCTIONS = """\
vToken evicts tokens from a vLLM server's KV cache and gives whole blocks back. `diagnosis` says
what limits the cache now and why; `what_if` says what a change would do and changes nothing.
Evicted tokens come back only if they are parked in host memory (`status.parking`)."""
CHANGES = """
Every change is on trial for `confirm_within_s` seconds. Watch `diagnosis`, then call `confirm`;
else the engine reverts the change by itself."""

Engine = Annotated[
    int | None, Field(description="rank of one engine, if the server has several; see `engines`")
]
Patch = Annotated[
    dict[str, Any],
    Field(description='settings to change, a JSON merge patch: {"theta_f": 0.1}; see `config`'),
]
Guards = Annotated[
    list[dict[str, Any]] | None,
    Field(
        description="revert also if a metric crosses a limit: "
        '[{"metric": "preemptions", "above": 0}]'
    ),
]
TrialSeconds = Annotated[int, Field(ge=1, le=wire.MAX_TRIAL_SECONDS)]

Tool = Callable[..., Awaitable[Any]]


def build(server: Server, *, can_control: bool) -> MCPServer:
    """The MCP server in front of `server`; `can_control`: with the tools that change something."""
    tools = Tools(server)
    made = MCPServer(
        "vtoken",
        instructions=INSTRUCTIONS + (CHANGES if can_control else ""),
        version=__version__,
        log_level="WARNING",
    )
    reading: tuple[Tool, ...] = (
        tools.diagnosis,
        tools.status,
        tools.engines,
        tools.config,
        tools.policies,
        tools.requests,
        tools.events,
        tools.what_if,
    )
    changing: tuple[Tool, ...] = (
        tools.change,
        tools.confirm,
        tools.undo,
        tools.compact,
        tools.restore,
    )
    for tool in reading:
        _add(made, tool, ToolAnnotations(read_only_hint=True))
    for tool in changing if can_control else ():
        _add(made, tool, ToolAnnotations(read_only_hint=False, destructive_hint=True))
    return made


def _add(server: MCPServer, tool: Tool, annotations: ToolAnnotations) -> None:
    @functools.wraps(tool)
    async def answered(*args: Any, **kwargs: Any) -> str:
        try:
            return msgspec.json.encode(await tool(*args, **kwargs)).decode()
        except ProblemError as error:
            raise ToolError(str(failure_of(error, verbose=True))) from error

    server.tool(annotations=annotations, structured_output=False)(answered)


class Tools:
    """The tools by name; they answer documents of the REST API, as JSON."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def _ask(self, call: str, *args: Any, engine: int | None = None, **kwargs: Any) -> Any:
        server = self._server if engine is None else replace(self._server, engine=engine)
        async with AsyncClient(server) as client:
            return await getattr(client, call)(*args, **kwargs)

    async def diagnosis(self, engine: Engine = None) -> Any:
        """What limits the KV cache now and why, in a sentence, with the numbers behind it."""
        status: wire.Status = await self._ask("status", engine=engine)
        return {
            "sentence": status.fragmentation.sentence,
            "advice": status.advice,
            "cause": status.fragmentation.cause,
            "blocks": status.blocks,
            "requests": status.requests,
            "pressure": status.pressure,
            "reclaimable_blocks": status.fragmentation.reclaimable_blocks,
            "closed_gates": [g for g in status.fragmentation.gates if not g.open],
            "latency": status.latency,
            "canary": status.canary,
            "guards": status.guards,
            "failing_parts": [part for part in status.health if not part.ok],
            "violations": status.invariants.violations,
        }

    async def status(self, engine: Engine = None) -> Any:
        """The complete status of one engine."""
        return await self._ask("status", engine=engine)

    async def engines(self) -> Any:
        """Every engine of the server, and whether they answer and agree."""
        return await self._ask("engines")

    async def config(self, engine: Engine = None) -> Any:
        """The settings, desired and in effect, with the bound of each, and the change on trial."""
        return await self._ask("config", engine=engine)

    async def policies(self) -> Any:
        """The eviction policies with the JSON schema of their parameters."""
        return await self._ask("policies")

    async def requests(self, engine: Engine = None) -> Any:
        """Every request that holds or waits for blocks."""
        return await self._ask("requests", engine=engine)

    async def events(
        self,
        limit: Annotated[int, Field(ge=1, le=1000)] = 50,
        kind: wire.EventKind | None = None,
        engine: Engine = None,
    ) -> Any:
        """The newest events, oldest first; of one kind or of all."""
        found = await self._ask("newest_events", EVERY_EVENT if kind else limit, engine=engine)
        return [event for event in found if kind in (None, event.kind)][-limit:]

    async def what_if(self, patch: Patch, engine: Engine = None) -> Any:
        """What a change would do: tokens evicted and moved, blocks freed. Changes nothing."""
        return await self._ask("patch_config", patch, validate_only=True, engine=engine)

    async def change(
        self,
        patch: Patch,
        confirm_within_s: TrialSeconds = wire.GUARD_SECONDS,
        guards: Guards = None,
        engine: Engine = None,
    ) -> Any:
        """Change settings on trial; the engine reverts them unless `confirm` is called in time."""
        try:
            limits = msgspec.convert(guards or [], list[wire.Guard])
        except msgspec.ValidationError as error:
            raise ToolError(f"guards: {error}") from error
        return await self._ask(
            "patch_config",
            patch,
            confirm_within_s=confirm_within_s,
            guards=limits,
            engine=engine,
        )

    async def confirm(self, engine: Engine = None) -> Any:
        """Keep the change that is on trial."""
        return await self._ask("confirm", engine=engine)

    async def undo(self, engine: Engine = None) -> Any:
        """Restore the settings before the last change; parked tokens come back with them."""
        return await self._ask("undo", engine=engine)

    async def compact(
        self, request_id: str | None = None, dry_run: bool = True, engine: Engine = None
    ) -> Any:
        """Run one round of compaction, or only plan it (`dry_run`, the default)."""
        return await self._ask("compact", request_id=request_id, dry_run=dry_run, engine=engine)

    async def restore(self, request_id: str, dry_run: bool = True, engine: Engine = None) -> Any:
        """Bring parked tokens of a request back now, or only report it (`dry_run`, the default)."""
        return await self._ask("restore", request_id, validate_only=dry_run, engine=engine)
