"""`vtoken doctor`: its findings on a real server on the real core, and without a server."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.cli_harness import run
from tests.support.core.live import LiveEngine, make_pressed
from tests.support.served_core import serving
from tests.support.serving import Served, serve
from tests.support.waiting import until
from vtoken import wire
from vtoken.cli.doctor import Finding
from vtoken.policies import policy_names
from vtoken.sentences import counted


async def findings(served: Served) -> dict[str, Finding]:
    """Check -> what `doctor` found."""
    ran = await run("doctor", "--json", "--url", served.url)
    found = [msgspec.json.decode(line, type=Finding) for line in ran.out.splitlines()]
    assert ran.code == any(one.verdict == "FAIL" for one in found)
    return {one.check: one for one in found}


def failed(found: dict[str, Finding]) -> set[str]:
    return {check for check, one in found.items() if one.verdict == "FAIL"}


async def test_doctor_tells_whether_eviction_and_reclamation_have_fired(
    served: Served, core: LiveEngine
) -> None:
    ran = await run("doctor", "-v", "--url", served.url)
    assert ran.code == 0
    assert "tokens evicted" in ran.out
    assert "paused: 0 blocks reclaimed" in ran.out
    assert "changes allowed" in ran.out
    core.runtime.counters.invariants.violations = 1
    assert failed(await findings(served)) == {"invariants"}


async def test_what_is_ok_has_one_line_and_what_is_not_its_command(
    served: Served, core: LiveEngine
) -> None:
    core.facts.reclamation_by, core.facts.reclamation_since_ts = "root", time.time() - 240
    *noted, good = (await run("doctor", "--url", served.url)).out.splitlines()
    assert "! resume: reclamation paused by root 4 min ago: holes stay → vtoken resume" in noted
    assert good.startswith("✔ version, ")
    assert "memory, eviction, reclamation, " in good


async def test_doctor_advises_on_a_short_memory_and_fails_while_it_is() -> None:
    core = make_pressed(budget_tokens=30)
    while core.reporter.status().pressure.waits_for != "end":  # type: ignore[union-attr]
        core.steps(1)
    async with serving(core) as served:
        ran = await run("doctor", "--url", served.url)
        (memory,) = [line for line in ran.out.splitlines() if line.startswith("✖ ")]
        status = core.reporter.status()
        assert status.pressure is not None
        assert status.relief is not None
        floor = status.relief.remedies[0].change["budget_tokens"]
        command = f"vtoken config set budget_tokens={floor} --confirm-within 10m"
        missing = counted(status.pressure.short_blocks, "block")
        waits = rf"✖ memory: \d+ waits? \([^)]+\), {missing} missing"
        assert re.fullmatch(f"{waits} → {command}", memory)
        assert f"    floor 30 → {floor} tokens: " in ran.out
        assert "    start with --kv-cache-memory-bytes " in ran.out
        assert ran.code == 1
        for options in ((), ("--all",), ("--engine", "0")):
            checked = await run("status", "--check", *options, "--url", served.url)
            assert checked.code == 2
            (line,) = checked.out.splitlines()
            assert re.match(
                r"(SHORT|FULL): .* missing; .*floor 30 → 20 tokens: |(SHORT|FULL)", line
            )
        shown = (await run("status", "--url", served.url)).out.splitlines()
        assert shown[1].startswith(f"  floor 30 → {floor} tokens: ")
        assert shown[2] == f"    {command}"


async def test_a_check_of_several_engines_tells_of_the_worst(
    served: Served, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet"
    fleet.write_text(f"{served.url} name=gpu7\nhttp://127.0.0.1:9 name=gpu8\n")
    assert (await run("status", "--check", "--url", served.url)).code == 0
    ran = await run("status", "--check", "--all", "--fleet", str(fleet))
    assert (ran.code, ran.out.split(":")[0]) == (2, "gpu8")


@pytest.mark.parametrize(("wasted", "noted"), [(200, False), (300, True)])
async def test_doctor_notes_many_moves_in_vain(
    served: Served, core: LiveEngine, wasted: int, noted: bool
) -> None:
    done = core.runtime.counters.reclamation
    done.moved_tokens, done.moved_then_evicted_tokens = 1000, wasted
    found = (await findings(served)).get("moves")
    assert (found is not None) == noted
    if found is not None:
        assert found.found.startswith("30% of 1,000 moved tokens died soon after: raise ")
        assert "interval_tokens=N" in found.command


async def test_dead_recorder_and_audit_log_are_seen_before_they_are_needed(
    core: LiveEngine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    async with serve(core.handle, state_dir=str(tmp_path / "file" / "x")) as served:
        await until(lambda: served.engine.flight.problem, "not noticed")
        shown = (await run("status", "--url", served.url)).out.splitlines()
        assert "FAILS: audit: entries are kept in memory only, until this process ends:" in shown[0]
        assert "FAILS: recorder: stopped: " in shown[1]
        assert "Not a directory" in shown[1]
        assert "(since " in shown[1]
        found = await findings(served)
        assert failed(found) == {"audit", "recorder"}
        assert "vtoken record FILE" in found["recorder"].todo


async def test_doctor_without_a_server_fails_and_says_what_to_do() -> None:
    ran = await run("doctor", "--url", "http://127.0.0.1:9")
    assert ran.code == 1
    assert "vtoken serve" in ran.out


async def test_a_policy_that_cannot_be_loaded_is_told_by_list_and_doctor(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = wire.PolicyInfo(
        name="lazy (some-package)",
        summary="cannot be loaded",
        source="-",
        needs=[],
        params_schema={},
        error="ImportError: no lazy",
    )
    monkeypatch.setattr("vtoken.control.controller.describe_broken", lambda: [broken])
    listed = await run("policy", "list", "--url", served.url)
    assert "cannot be loaded: ImportError: no lazy" in listed.out
    ran = await run("doctor", "-v", "--url", served.url)
    assert ran.code == 0
    assert "lazy (some-package): ImportError: no lazy" in ran.out
    assert f"{len(policy_names())} available" in ran.out
