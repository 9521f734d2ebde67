"""`vtoken doctor`: its findings on a real server on the real core, and without a server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.cli_harness import run
from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.waiting import until
from vtoken import wire
from vtoken.cli.doctor import Finding
from vtoken.policies import policy_names


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
    ran = await run("doctor", "--url", served.url)
    assert ran.code == 0
    assert "tokens evicted" in ran.out
    assert "paused: 0 blocks reclaimed" in ran.out
    assert "changes allowed" in ran.out
    core.runtime.counters.invariants.violations = 1
    assert failed(await findings(served)) == {"invariants"}


async def test_doctor_notes_that_holes_cost_more_than_the_round_that_nobody_lets_run(
    served: Served, core: LiveEngine
) -> None:
    core.core.worker.hole_us = 500
    core.steps(4)
    found = (await findings(served))["prices"]
    assert found.verdict == "note"
    assert "hole 500 µs a token" in found.found
    assert "vtoken resume" in found.todo
    core.configure(reclamation="auto")
    assert (await findings(served))["prices"].verdict == "ok"


@pytest.mark.parametrize(("wasted", "verdict"), [(200, "ok"), (300, "note")])
async def test_doctor_notes_many_moves_in_vain(
    served: Served, core: LiveEngine, wasted: int, verdict: str
) -> None:
    core.configure(reclamation="auto")
    done = core.runtime.counters.reclamation
    done.reclaimed_blocks, done.moved_tokens, done.copy_us = 9, 1000, 50_000
    done.moved_then_evicted_tokens = wasted
    found = (await findings(served))["reclamation"]
    assert found.verdict == verdict
    cost = f"{wasted // 10}% of 1,000 moved tokens were evicted within 64 steps ({wasted // 20} ms"
    assert cost in found.found
    assert ("interval_tokens=N" in found.todo) == (verdict == "note")


async def test_doctor_notes_a_signal_from_layers_that_nobody_measured(
    served: Served, core: LiveEngine
) -> None:
    assert (await findings(served))["calibration"].verdict == "ok"  # the policy reads no signal
    core.configure(policy={"name": "h2o", "params": {}})
    assert (await findings(served))["calibration"].verdict == "note"
    core.configure(probe={"layers": [1]})
    assert (await findings(served))["calibration"].verdict == "ok"


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
    ran = await run("doctor", "--url", served.url)
    assert ran.code == 0
    assert "lazy (some-package): ImportError: no lazy" in ran.out
    assert f"{len(policy_names())} available" in ran.out
