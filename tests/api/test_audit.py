"""The audit log on disk: restarts, rotation, truncated lines, full disks."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.core.live import LiveEngine, make_quiet
from tests.support.served_core import serving
from tests.support.serving import Served, serve
from tests.support.small_files import NO_BYTECODE
from tests.support.waiting import until
from vtoken import wire
from vtoken.wire import commands
from vtoken_api.state import own_actions
from vtoken_api.state.audit import AUDIT_FILE, AuditLog
from vtoken_api.state.journal import Journal
from vtoken_api.state.statedir import StateDir


@asynccontextmanager
async def journal_in(folder: Path) -> AsyncIterator[Journal]:
    """The journal of a server with the state directory `folder`."""
    state_dir = StateDir(folder)
    journal = Journal(state_dir)
    try:
        yield journal
    finally:
        await journal.close()
        state_dir.close()


def entry(number: int) -> wire.AuditEntry:
    changes: dict[str, list[Any]] = {"theta_f": [0.1, 0.2]}
    return wire.AuditEntry(
        ts=1.0, actor="ana@local", action="config", changes=changes, revision=number, dry_run=False
    )


def enter(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        journal.enter(entry(number))


async def revisions(journal: Journal, limit: int = 1000) -> list[int]:
    return [entry.revision for entry in (await journal.entries(limit)).entries]


async def test_entries_outlive_the_process_and_are_for_its_user_alone(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as first:
        enter(first, 1, 2)
    async with journal_in(tmp_path) as second:
        enter(second, 3)
        assert await revisions(second) == [1, 2, 3]
        assert await revisions(second, limit=2) == [2, 3]
    assert (tmp_path / AUDIT_FILE).stat().st_mode & 0o777 == 0o600


async def test_server_that_another_one_keeps_from_the_disk_writes_its_entries_afterwards(
    tmp_path: Path,
) -> None:
    async with journal_in(tmp_path) as second:
        async with journal_in(tmp_path) as first:
            enter(first, 1)
            await first.settle()
            enter(second, 2)
            page = await second.entries(10)
            assert [entry.revision for entry in page.entries] == [2]
            assert "another server uses" in page.storage_error
        await second.probe()
        assert await revisions(second) == [1, 2]


@pytest.mark.parametrize(("max_bytes", "least"), [(2000, 10), (100, 2)])
def test_rotation_bounds_the_disk_and_splits_no_entry(
    tmp_path: Path, max_bytes: int, least: int
) -> None:
    with closing(StateDir(tmp_path)) as state_dir:
        log = AuditLog(state_dir, max_bytes=max_bytes)
        for number in range(100):
            log.append(entry(number))
        held = [entry.revision for entry in log.page(1000).entries]
    assert held == list(range(100 - len(held), 100))
    assert least <= len(held) < 100
    files = list(tmp_path.glob(f"{AUDIT_FILE}*"))
    assert len(files) == 2
    longest = max(len(line) for file in files for line in file.read_bytes().splitlines())
    assert all(file.stat().st_size <= max(max_bytes, longest + 1) for file in files)


async def test_torn_last_line_is_passed_over_and_ended(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        enter(journal, 1)
    with (tmp_path / AUDIT_FILE).open("ab") as file:
        file.write(b'{"ts": 12.5, "actor": "a')
    async with journal_in(tmp_path) as journal:
        enter(journal, 2)
        assert await revisions(journal) == [1, 2]


async def test_bytes_that_are_no_journal_are_passed_over(tmp_path: Path) -> None:
    deep = b'{"more":' + b"[" * 100_000
    (tmp_path / AUDIT_FILE).write_bytes(deep + b"\n\x00\xff\n[]\n\n" + deep + b"\n" + b"x" * 1000)
    async with journal_in(tmp_path) as journal:
        enter(journal, 7)
        assert await revisions(journal) == [7]


async def test_full_disk_stops_nothing_is_told_and_is_made_up_for(
    tmp_path: Path, server_log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / AUDIT_FILE
    path.symlink_to("/dev/full")  # every write fails with ENOSPC
    async with journal_in(tmp_path) as journal:
        enter(journal, 1, 2)
        page = await journal.entries(10)
        assert [entry.revision for entry in page.entries] == [1, 2]
        assert "No space left" in page.storage_error
        assert "cannot write the audit log" in server_log.text
        path.unlink()
        enter(journal, 3)
        page = await journal.entries(10)
        assert [entry.revision for entry in page.entries] == [1, 2, 3]
        assert page.storage_error == ""
        assert "written again" in server_log.text
    assert len(path.read_bytes().splitlines()) == 3


def test_write_that_was_cut_short_is_taken_back(tmp_path: Path) -> None:
    code = NO_BYTECODE + (
        "import resource, sys; from pathlib import Path\n"
        "from vtoken_api.state.audit import AuditLog\n"
        "from vtoken_api.state.statedir import StateDir\n"
        "from vtoken.wire import AuditEntry\n"
        "log = AuditLog(StateDir(Path(sys.argv[1])))\n"
        "for actor in ('ana', 'b' * 500):\n"
        "    log.append(AuditEntry(1.0, actor, 'undo', {}, 1, False))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "print(log.error, [len(entry.actor) for entry in log.page(10).entries])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "No space left" in done.stdout
    assert "[3, 500]" in done.stdout
    (line,) = (tmp_path / AUDIT_FILE).read_bytes().splitlines()
    assert msgspec.json.decode(line, type=wire.AuditEntry).actor == "ana"


async def test_memory_is_bounded_while_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with journal_in(tmp_path / "file" / "state") as journal:
        enter(journal, *range(1200))
        page = await journal.entries(1000)
    assert [entry.revision for entry in page.entries] == list(range(200, 1200))
    assert page.dropped == 200
    assert "Not a directory" in page.storage_error


# ---------------------------------------------------------------- the engine's own actions


async def own_acts(served: Served, count: int) -> list[tuple[str, str, int]]:
    """Wait for `count` entries: actor, action and event of each; fails if there are more."""
    acts: list[wire.AuditEntry] = []

    async def come() -> bool:
        nonlocal acts
        entries = (await served.service.journal.entries(1000)).entries
        acts = [entry for entry in entries if entry.actor in ("trial", "guard")]
        return len(acts) >= count

    await until(come, f"{count} acts of the engine")
    assert all(act.epoch == "e1" for act in acts)
    seqs = [act.event_seq for act in acts]
    assert len(seqs) == count
    assert seqs == sorted(set(seqs))
    return [(act.actor, act.action, act.revision) for act in acts]


def pass_guard(core: LiveEngine, theta_f: float) -> None:
    """A change on trial that the engine reverts at its next step."""
    guards = [wire.Guard(metric="preemptions", above=0)]
    call = commands.PatchConfig(patch={"theta_f": theta_f}, guards=guards)
    assert core.handle(commands.Command(call=call)).problem is None
    core.runtime.counters.requests.preempted += 1
    core.steps()


async def test_what_the_engine_takes_back_is_entered_once_with_its_event_and_time(
    core: LiveEngine, tmp_path: Path
) -> None:
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        pass_guard(core, 0.5)
        assert await own_acts(served, 1) == [("guard", "revert", 3)]
        (event,) = [e for e in core.runtime.events.page(0, 1000).events if "reverted" in e.data]
        (entry,) = (await served.service.journal.entries(1)).entries
        assert (entry.event_seq, entry.ts) == (event.seq, event.ts)


async def test_engine_that_ended_with_a_change_on_trial_has_an_entry(tmp_path: Path) -> None:
    trial = ("PATCH", "/config?confirm_within_s=600", {"theta_f": 0.7})
    confirm, undo = ("POST", "/confirm", None), ("POST", "/undo", None)

    async def life(*calls: tuple[str, str, Any]) -> list[tuple[str, str, int]]:
        """What a new engine's server entered, if `calls` were made and a guard was crossed."""
        core = make_quiet(epoch=uuid.uuid4().hex)
        async with (
            serving(core, state_dir=str(tmp_path)) as served,
            httpx.AsyncClient(base_url=f"{served.url}/vtoken/v1") as http,
        ):
            before = len((await served.service.journal.entries(100)).entries)
            pass_guard(core, 0.5)  # its entry comes after that of an earlier trial's end
            await until(lambda: reverted(served, before), "the engine's act was not entered")
            for method, path, content in calls:
                answer = await http.request(method, path, json=content)
                assert answer.is_success, answer.text
            entries = (await served.service.journal.entries(100)).entries
        return [
            (e.actor, e.action, e.revision) for e in entries if e.ts >= core.controller.started_ts
        ]

    async def reverted(served: Served, before: int) -> bool:
        entries = (await served.service.journal.entries(100)).entries
        return "revert" in [entry.action for entry in entries[before:]]

    act = ("guard", "revert", 3)
    assert await life(trial) == [act, ("127.0.0.1", "trial", 4)]
    assert await life() == [("engine", "ended with a change on trial", 4), act]
    assert await life() == [act]  # once
    assert await life(trial, confirm, undo, trial, undo) == [
        act,
        *(("127.0.0.1", action, n) for action, n in [("trial", 4), ("confirm", 4), ("undo", 5)]),
        *(("127.0.0.1", action, n) for action, n in [("trial", 6), ("undo", 7)]),
    ]
    assert await life() == [act]  # nothing was on trial


async def test_act_whose_event_was_never_heard_is_entered_all_the_same(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_actions, "PERIOD_S", 0.05)
    async with serve(core.handle, state_dir=str(tmp_path)) as served:
        await own_acts(served, 0)
        monkeypatch.setattr(own_actions.OwnActions, "take", lambda *_: None)
        for number, theta_f in enumerate((0.5, 0.6), 1):
            pass_guard(core, theta_f)
            assert len(await own_acts(served, number)) == number


async def test_entries_in_memory_are_written_as_soon_as_the_disk_takes_them_without_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / AUDIT_FILE
    path.symlink_to("/dev/full")
    async with journal_in(tmp_path) as journal:
        enter(journal, 1)
        await journal.settle()
        assert journal.audit.error
        path.unlink()
        await journal.probe()
        assert journal.audit.error == ""
    assert len(path.read_bytes().splitlines()) == 1


async def test_file_that_cannot_be_written_is_noticed_before_there_is_an_entry(
    tmp_path: Path,
) -> None:
    path = tmp_path / AUDIT_FILE
    async with journal_in(tmp_path) as journal:
        await journal.probe()
        assert journal.audit.error == ""
        path.unlink()
        path.mkdir()
        await journal.probe()
        assert "Is a directory" in journal.audit.error
        assert journal.audit.error_ts > 0


async def test_server_without_a_usable_state_directory_serves_and_says_so(
    core: LiveEngine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    async with serve(core.handle, state_dir=str(tmp_path / "file" / "x")) as served:
        pass_guard(core, 0.5)
        assert await own_acts(served, 1) == [("guard", "revert", 3)]
        page = msgspec.json.decode(
            (await served.http.get("/vtoken/v1/audit")).content, type=wire.AuditPage
        )
        assert "Not a directory" in page.storage_error
        assert [entry.action for entry in page.entries] == ["revert"]
