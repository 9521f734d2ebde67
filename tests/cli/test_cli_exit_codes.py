"""Exit codes of every command: 0 on success, 1 on failure, 2 on wrong usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli_harness import VTOKEN, Url, leaves, run, spawn, terminal
from tests.support.core.live import SESSION, LiveEngine
from tests.support.serving import Served
from tests.support.small_files import limited
from tests.support.waiting import until
from vtoken import wire
from vtoken.cli.doctor import Finding
from vtoken.cli.record import Recorded
from vtoken.recording import RecordingReader

# The arguments with which each command succeeds, {} is a folder; and what it prints, a document a
# line.
WORKS: dict[str, tuple[str, Any]] = {
    "status": ("", wire.Status),
    "engines": ("", wire.Fleet),
    "watch": ("--count 1", wire.StreamMessage),
    "requests": ("", list[wire.RequestRow]),
    "request": ("a", wire.RequestDetail),
    "block": ("3", wire.BlockDetail),
    "events": ("", wire.Event),
    "audit": ("", wire.AuditPage),
    "doctor": ("", Finding),
    "config get": ("", wire.ConfigDocument),
    "config set": ("theta_f=0.5", wire.PatchResult),
    "policy list": ("", list[wire.PolicyInfo]),
    "policy use": ("tova", wire.PatchResult),
    "compact": ("--request a --dry-run", wire.Operation),
    "forget": ("a 3 9", wire.Forgotten),
    "end": ("stream", wire.Ended),
    "restore": ("a", wire.Restored),
    "pause": ("", wire.PatchResult),
    "resume": ("--dry-run", wire.PatchResult),
    "confirm": ("", wire.PatchResult),
    "undo": ("", wire.PatchResult),
    "record": ("{}/run.jsonl --duration 1", Recorded),
}
SEVERAL = {"sync"}  # only on a server with several engines
ELSEWHERE = {"serve", "demo", "bench"}  # with parsers of their own
LOCAL = {"console", "completion", "mcp"}  # no document comes back


def test_no_command_is_forgotten_here() -> None:
    assert {title for title, _ in leaves()} == set(WORKS) | SEVERAL | ELSEWHERE | LOCAL


async def test_every_command_answers_0_and_documents(
    url: Url, core: LiveEngine, tmp_path: Path
) -> None:
    core.admit("stream", 20, rules=SESSION)
    for command, (needs, kind) in WORKS.items():
        if command == "confirm":
            trial = ("--confirm-within", "1m", *url)
            assert (await run("config", "set", "batch_size=5", *trial)).code == 0
        ran = await run(*command.split(), *needs.format(tmp_path).split(), "--json", *url)
        assert (command, ran.code, ran.err) == (command, 0, "")
        for line in ran.out.splitlines():
            msgspec.json.decode(line, type=kind)
        assert ran.out


async def test_every_command_answers_1_where_no_server_is(tmp_path: Path) -> None:
    for command, (needs, _) in WORKS.items():
        arguments = (*command.split(), *needs.format(tmp_path).split())
        ran = await run(*arguments, "--url", "http://127.0.0.1:9")
        assert (command, ran.code) == (command, 1)
        assert "connection refused" in ran.err + ran.out
        assert "vtoken serve MODEL" in ran.err + ran.out
        assert "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


async def test_every_command_answers_2_to_what_it_does_not_know() -> None:
    for command in (set(WORKS) | LOCAL) - {"completion"}:
        needs, _ = WORKS.get(command, ("", None))
        ran = await run(*command.split(), *needs.format("").split(), "--jsonn")
        assert (command, ran.code, ran.out) == (command, 2, "")
        assert "No such option '--jsonn'" in ran.err
        assert f"vtoken {command} --help" in ran.err


FULL = "/dev/full"  # every write to it fails: no space left on device


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"no {FULL} on this system")
@pytest.mark.parametrize("command", ["status", "events --json", "watch"])
async def test_output_that_cannot_be_written_is_said_and_is_a_failure(
    served: Served, command: str
) -> None:
    full = ("/bin/sh", "-c", f'exec "$@" >{FULL}', "sh")
    ran = await spawn(*full, *VTOKEN, *command.split(), "--url", served.url)
    assert ran.code == 1
    assert ran.err == "vtoken: the output cannot be written: No space left on device\n"


async def test_a_recording_that_does_not_fit_the_disk_is_readable_so_far(
    served: Served, tmp_path: Path
) -> None:
    segments, file = served.service.journal.flights[0].segments, tmp_path / "now.jsonl"
    await until(lambda: served.engine.flight.recording and segments.listed(), "not recording")
    command = limited(*VTOKEN, "record", str(file), "--last", "5m", "--url", served.url)
    ran = await spawn(*command)
    assert (ran.code, ran.out) == (1, "")
    assert f"vtoken: {file}: cannot be written: File too large; the first " in ran.err
    with RecordingReader(file) as reader:
        assert reader.next() is not None


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["coloured", "no_color"])
async def test_colour_is_for_terminals_that_want_it(served: Served, env: dict[str, str]) -> None:
    command = (*VTOKEN, "status", "--url", served.url)
    async with terminal(*command, **{"TERM": "xterm", **env}) as screen:
        shown = await screen.rest()
    assert "random always: budget 64" in shown
    assert ("\x1b[" in shown) is (not env)


@pytest.mark.parametrize("command", ["config get", "policy list"])
async def test_a_narrow_terminal_breaks_lines_at_words_and_cuts_nothing_off(
    served: Served, command: str
) -> None:
    words = (*command.split(), "--url", served.url)
    env = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "60"}
    async with terminal(*VTOKEN, *words, **env) as screen:
        shown = await screen.rest()
    assert "".join(shown.split()) == "".join((await run(*words)).out.split())
    assert max(map(len, shown.splitlines())) <= 60
