"""`--all`: a command on every engine of every named server: a table, and one sentence on all.

Servers are asked side by side. One that fails has a row that says why, and the others go on. The
exit code is 1 if one failed, or if engines differ.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus

import msgspec

from vtoken import wire
from vtoken.cli.act import change
from vtoken.cli.errors import UsageError, warn_ignored_token
from vtoken.cli.printing import coloured, print_document, table
from vtoken.cli.show import change_words, member_rows
from vtoken.client import AsyncClient, OutcomeUnknown, ProblemError, Server
from vtoken.client.calls import Call
from vtoken.sentences import counted, fleet_sentence
from vtoken.wire.fleet import drifts


class ServerReport(msgspec.Struct, omit_defaults=True):
    """One server: its engines, what it answered to a change, or why it did not."""

    name: str
    url: str
    engines: list[wire.EngineRow] = []
    result: wire.PatchResult | None = None
    problem: wire.Problem | None = None


class FleetReport(msgspec.Struct):
    """All servers. `ok`: all answer, and all engines run one configuration."""

    ok: bool
    sentence: str
    servers: list[ServerReport]


Configs = dict[tuple[str, int], tuple[wire.Status, wire.ConfigDocument]]


def every(
    arguments: Namespace,
    *,
    lookup_s: float = 0.0,
    on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None,
) -> int:
    """Run `status`, or a command that changes the configuration, on all servers."""
    servers: Sequence[Server] = arguments.servers
    if getattr(arguments, "if_revision", None) is not None and len(servers) > 1:
        raise UsageError("--if-revision is about one server", "every server counts its own")
    call = None if arguments.command == "status" else change(arguments)

    async def ask() -> FleetReport:
        clients = [AsyncClient(s, lookup_s=lookup_s, on_lookup=on_lookup) for s in servers]
        try:
            return await _report(clients, call)
        finally:
            for client in clients:
                if client.token_ignored and not arguments.json:
                    warn_ignored_token(client.server)
                await client.aclose()

    report = asyncio.run(ask())
    print_document(arguments, report, status_lines if call is None else change_lines)
    return 0 if report.ok else 1


async def _report(
    clients: Sequence[AsyncClient], call: Call[wire.PatchResult] | None
) -> FleetReport:
    configs: Configs = {}
    servers = await asyncio.gather(*(_ask(client, call, configs) for client in clients))
    found = drifts(configs)
    rows, names = [], []
    for server in servers:
        for row in server.engines:
            row.drift = found.get((server.name, row.engine), {})
            rows.append(row)
            names.append(_called(server, row, of_several=len(servers) > 1))
        if server.problem is not None and not server.engines:
            rows.append(_failed(server.problem))
            names.append(server.name)
    failed = [server for server in servers if server.problem is not None]
    ok = not failed and not any(row.problem or row.drift for row in rows)
    sentence = fleet_sentence(rows, names)
    if failed and failed[0].engines:  # it answers, and refused
        sentence = f"{failed[0].name} refuses: {_words(failed[0].problem)}"
    return FleetReport(ok=ok, sentence=sentence, servers=servers)


async def _ask(
    client: AsyncClient, call: Call[wire.PatchResult] | None, configs: Configs
) -> ServerReport:
    """One server's report; adds what its engines run with to `configs`."""
    server = client.server
    report = ServerReport(server.label, server.url)
    try:
        if call is not None:
            report.result = await client.send(call)
    except ProblemError as error:
        report.problem = error.problem
    try:
        report.engines, numbered = await _engines(client)
        for row in report.engines:
            if row.status is not None and not row.problem:
                if numbered:
                    client.server = replace(server, shown=row.engine)
                configs[report.name, row.engine] = (row.status, await client.config())
    except ProblemError as error:
        report.problem = report.problem or error.problem
    finally:
        client.server = server
    return report


async def _engines(client: AsyncClient) -> tuple[list[wire.EngineRow], bool]:
    """The addressed engine of a server, or all; and whether calls may name an engine.

    An older server has one engine, no list of them, and refuses calls that name one.
    Raises ProblemError.
    """
    try:
        rows = (await client.engines()).engines
    except ProblemError as error:
        if error.problem.status != HTTPStatus.NOT_FOUND:
            raise
        status = await client.status()
        return [wire.EngineRow(engine=0, status=status, revision=status.config_revision)], False
    rank = client.server.engine
    if rank is None:
        return rows, True
    if rank not in [row.engine for row in rows]:
        await client.status()  # the server's own refusal
    return [row for row in rows if row.engine == rank], True


def _failed(problem: wire.Problem) -> wire.EngineRow:
    return wire.EngineRow(engine=0, status=None, problem=_words(problem))


def _words(problem: wire.Problem | None) -> str:
    assert problem is not None
    refused = problem.status >= HTTPStatus.BAD_REQUEST
    return f"{problem.status}: {problem.detail}" if refused else problem.detail


def _called(server: ServerReport, row: wire.EngineRow, *, of_several: bool) -> str:
    """`engine 1` of the only server; of several `gpu7`, or `gpu7/1` if it has several engines."""
    if not of_several:
        return f"engine {row.engine}"
    return f"{server.name}/{row.engine}" if len(server.engines) > 1 else server.name


# ---------------------------------------------------------------- lines


def status_lines(report: FleetReport) -> list[str]:
    """A row for each engine, and for each server that does not answer."""
    labelled: list[tuple[str, wire.EngineRow]] = []
    for server in report.servers:
        labelled += [(_called(server, row, of_several=True), row) for row in server.engines]
        if server.problem is not None:
            labelled.append((server.name, _failed(server.problem)))
    return [*table(member_rows("SERVER", labelled)), _verdict(report)]


def change_lines(report: FleetReport) -> list[str]:
    """A row for each server, with what became of the change there."""
    rows = [("SERVER", "ENGINES", "REVISION", "CHANGE")]
    made = 0
    for server in report.servers:
        result, why = server.result, ""
        if server.problem is not None:
            why = coloured(f"FAILED: {_words(server.problem)}", "full")
        if result is None:
            rows.append((server.name, "-", "-", why))
            continue
        made += 1
        parts = [part.engine for part in result.engines] or [result.engine or 0]
        ranks = ", ".join(str(rank) for rank in parts)
        change = "; then ".join(filter(None, (change_words(result), why)))
        rows.append((server.name, ranks, f"{result.revision}", change))
    lines = table(rows)
    if made < len(report.servers):
        lines.append(f"answered by {made} of {counted(len(report.servers), 'server')}")
    return [*lines, _verdict(report)]


def _verdict(report: FleetReport) -> str:
    return report.sentence if report.ok else coloured(report.sentence, "fragmented")
