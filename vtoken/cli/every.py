"""`--all`: a command on every engine of every named server: a table, and one sentence on all.

Servers are asked side by side. One that fails has a row that says why, and the others go on. The
exit code is 1 if one failed, or if engines differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus

import msgspec

from vtoken import wire
from vtoken.cli.errors import UsageError
from vtoken.cli.printing import Part, Table, coloured
from vtoken.cli.remote import Remote
from vtoken.cli.show import change_lines, member_table, patch_lines, verdict
from vtoken.client import AsyncClient, ProblemError
from vtoken.client.call import Call
from vtoken.sentences import counted, fleet_sentence
from vtoken.sentences.situation import level
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


def change(remote: Remote, call: Call[wire.PatchResult]) -> int:
    """Make a change on the named server, or on each of them, and print what became of it."""
    if remote.every:
        return report(remote, call)
    remote.out.show(remote.client.send(call), patch_lines)
    return 0


def report(remote: Remote, call: Call[wire.PatchResult] | None = None) -> int:
    """Print the status of all servers, or make a change on each; returns the exit code."""
    if call is not None and "If-Match" in call.headers and len(remote.servers) > 1:
        raise UsageError("--if-revision is about one server", "every server counts its own")
    found = _report_of(remote, call)
    remote.out.show(found, status_parts if call is None else change_parts)
    return 0 if found.ok else 1


def check(remote: Remote) -> int:
    """Print one line on the worst of the engines; 2: memory is short there, or it does not answer,
    1: memory is nearly short, 0: neither.
    """
    servers = _report_of(remote).servers
    found = []
    for server in servers:
        several = len(servers) > 1
        found += [(_called(server, row, of_several=several), row) for row in server.engines]
        if server.problem is not None:
            found.append((server.name, _failed(server.problem)))
    name, worst = max(found, key=lambda one: _check_code(one[1]))
    code, text = _check_code(worst), worst.problem
    if worst.status is not None and not text:
        advice = [one.text for one in worst.status.advice if one.level != "note"]
        text = "; ".join([worst.status.fragmentation.sentence.removesuffix("."), *advice[:1]])
    line = f"{name}: {text}" if len(found) > 1 else text
    remote.out.show(worst, lambda _: [coloured(line, ("ok", "fragmented", "full")[code])])
    return code


def _check_code(row: wire.EngineRow) -> int:
    if row.status is None or row.problem:
        return 2
    return {"short": 2, "near": 1, None: 0}[level(row.status)]


def _report_of(remote: Remote, call: Call[wire.PatchResult] | None = None) -> FleetReport:
    """The report on all servers."""

    async def ask() -> FleetReport:
        clients = [remote.opened(server) for server in remote.servers]
        try:
            return await _report(clients, call)
        finally:
            for client in clients:
                if client.token_ignored:
                    remote.tell_ignored_token(client.server)
                await client.aclose()

    return asyncio.run(ask())


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
        for row in await _engines(client):
            report.engines.append(row)
            if row.status is not None and not row.problem:
                client.server = replace(server, shown=row.engine)
                configs[report.name, row.engine] = (row.status, await client.config())
    except ProblemError as error:
        report.problem = report.problem or error.problem
    finally:
        client.server = server
    return report


async def _engines(client: AsyncClient) -> list[wire.EngineRow]:
    """The addressed engine of a server, or all. Raises ProblemError."""
    rows = (await client.engines()).engines
    rank = client.server.engine
    if rank is None:
        return rows
    if rank not in [row.engine for row in rows]:
        await client.status()  # the server's own refusal
    return [row for row in rows if row.engine == rank]


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


# ---------------------------------------------------------------- text


def status_parts(report: FleetReport) -> list[Part]:
    """A row for each engine, and for each server that does not answer."""
    labelled: list[tuple[str, wire.EngineRow]] = []
    for server in report.servers:
        labelled += [(_called(server, row, of_several=True), row) for row in server.engines]
        if server.problem is not None:
            labelled.append((server.name, _failed(server.problem)))
    return [member_table("SERVER", labelled), verdict(report.sentence, ok=report.ok)]


def change_parts(report: FleetReport) -> list[Part]:
    """A row for each server, with what became of the change there."""
    rows = []
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
        change = "; then ".join(filter(None, ("; ".join(change_lines(result)), why)))
        rows.append((server.name, ranks, f"{result.revision}", change))
    lines: list[Part] = [Table(rows, ("SERVER", "ENGINES", "REVISION", "CHANGE"))]
    if made < len(report.servers):
        lines.append(f"answered by {made} of {counted(len(report.servers), 'server')}")
    return [*lines, verdict(report.sentence, ok=report.ok)]
