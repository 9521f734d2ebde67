"""The real `vtoken` as a subprocess, against a real server on the real core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from core_engine import CoreEngine
from serving import Served, serve

from vtoken import __version__, wire
from vtoken.cli import main

VTOKEN = [sys.executable, "-m", "vtoken.cli"]
PATIENCE_S = 30.0


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self, kind: type) -> object:
        (line,) = self.out.splitlines()
        return msgspec.json.decode(line, type=kind)


def environment(**more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VTOKEN", "VLLM"))}
    return inherited | more


async def start(*arguments: str, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *VTOKEN,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**env),
    )


async def run(*arguments: str, **env: str) -> Ran:
    """Run to the end; never leaves a process behind."""
    process = await start(*arguments, **env)
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


# ---------------------------------------------------------------- one shot


async def test_status_reads_as_text_and_as_json(served: Served, core: CoreEngine) -> None:
    text = await run("status", VTOKEN_URL=served.url)
    assert (text.code, text.err) == (0, "")
    assert text.out.splitlines()[0] == core.reporter.status().fragmentation.sentence
    assert "random, budget 64 + 16 tokens, revision 1" in text.out
    assert "\x1b" not in text.out
    ran = await run("status", "--json", "--url", served.url)
    assert isinstance(ran.json(wire.Status), wire.Status)


async def test_config_is_read_set_and_undone(served: Served, core: CoreEngine) -> None:
    url = ("--url", served.url)
    shown = await run("config", "get", *url)
    assert "theta_f" in shown.out
    assert "0..1" in shown.out
    ran = await run("config", "set", "theta_f=0.5", "planner=pack", "probe.every_steps=4", *url)
    assert ran.code == 0
    assert "theta_f: 0.25 -> 0.5" in ran.out
    assert "planner: plug -> pack" in ran.out
    assert core.runtime.config.theta_f == 0.5
    assert core.runtime.config.probe_every_steps == 4
    assert (await run("undo", *url)).code == 0
    assert core.runtime.config.theta_f == 0.25
    config = (await run("config", "get", "--json", *url)).json(wire.ConfigDocument)
    assert isinstance(config, wire.ConfigDocument)
    assert config.revision == 3


async def test_dry_run_tells_the_effect_and_changes_nothing(
    served: Served, core: CoreEngine
) -> None:
    before = core.runtime.config
    for command in (
        ("config", "set", "budget_tokens=32"),
        ("policy", "use", "streaming_llm"),
        ("compact",),
    ):
        ran = await run(*command, "--dry-run", "--url", served.url)
        assert ran.code == 0
        assert "dry run: would" in ran.out
    assert core.runtime.config is before
    assert not core.runtime.operations.pending


async def test_policies_are_listed_and_used(served: Served, core: CoreEngine) -> None:
    url = ("--url", served.url)
    listed = await run("policy", "list", *url)
    assert "streaming_llm" in listed.out
    assert "sinks=" in listed.out
    assert (await run("policy", "use", "streaming_llm", "sinks=2", *url)).code == 0
    assert core.runtime.config.policy.name == "streaming_llm"
    assert core.runtime.config.values().policy.params["sinks"] == 2


async def test_switch_says_what_becomes_of_the_scores(served: Served, core: CoreEngine) -> None:
    url = ("--url", served.url)
    for arguments in (("tova", "--dry-run"), ("tova",)):
        ran = await run("policy", "use", *arguments, *url)
        assert "scores start anew: tova reads attention_last, until now it was no scores" in ran.out
    assert core.runtime.config.policy.name == "tova"


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
    monkeypatch.setattr("vtoken.control.describe_broken", lambda: [broken])
    listed = await run("policy", "list", "--url", served.url)
    assert "cannot be loaded: ImportError: no lazy" in listed.out
    ran = await run("doctor", "--url", served.url)
    assert ran.code == 0
    assert "lazy (some-package): ImportError: no lazy" in ran.out
    assert "11 on offer" in ran.out


async def test_pause_and_resume(served: Served, core: CoreEngine) -> None:
    assert (await run("resume", "--url", served.url)).code == 0
    assert core.runtime.config.reclamation == "auto"
    assert (await run("pause", "--url", served.url)).code == 0
    assert core.runtime.config.reclamation == "paused"


@pytest.mark.usefixtures("stepping")
async def test_compact_waits_for_the_result(served: Served) -> None:
    ran = await run("compact", "--request", "a", "--url", served.url)
    assert ran.code == 0
    assert ran.out.startswith("done: moved ")


async def test_compact_that_does_not_come_to_an_end_fails(served: Served) -> None:
    ran = await run("compact", "--timeout", "0.1", "--url", served.url)
    assert ran.code == 1
    assert "still pending" in ran.err


# ---------------------------------------------------------------- following


@pytest.mark.usefixtures("stepping")
async def test_watch_prints_a_line_for_every_state(served: Served) -> None:
    ran = await run("watch", "--interval", "0.1", "--count", "3", "--url", served.url)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) == 4
    assert all(" F 0." in line for line in lines[1:])


@pytest.mark.usefixtures("stepping")
async def test_watch_as_json_is_the_stream_itself(served: Served) -> None:
    ran = await run("watch", "--json", "--count", "4", "--url", served.url)
    messages = [msgspec.json.decode(x, type=wire.StreamMessage) for x in ran.out.splitlines()]
    assert [m.seq for m in messages] == [1, 2, 3, 4]
    assert isinstance(messages[0], wire.Hello)


async def test_followed_events_have_no_gap_and_come_line_by_line(
    served: Served, core: CoreEngine
) -> None:
    process = await start("events", "--follow", "--json", "--url", served.url)
    assert process.stdout is not None
    try:
        events: list[wire.Event] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(events) < 12:
                line = await process.stdout.readline()
                events.append(msgspec.json.decode(line, type=wire.Event))
                core.runtime.events.add(0, "server", "test", {})
                core.publisher.publish(core.controller.frame)
        assert [event.seq for event in events] == list(range(1, 13))
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_events_shows_the_newest(served: Served, core: CoreEngine) -> None:
    for number in range(30):
        core.runtime.events.add(0, "server", f"number {number}", {})
    ran = await run("events", "-n", "3", "--url", served.url)
    assert [line.split(": ")[1] for line in ran.out.splitlines()] == [
        "number 27",
        "number 28",
        "number 29",
    ]
    for number in range(2000):
        core.runtime.events.add(0, "server", f"number {number}", {})
    ran = await run("events", "-n", "1500", "--url", served.url)
    lines = [line.split(": ")[1] for line in ran.out.splitlines()]
    assert lines == [f"number {number}" for number in range(500, 2000)]


@pytest.mark.usefixtures("stepping")
async def test_record_writes_what_the_stream_says(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    ran = await run("record", str(file), "--duration", "3", "--url", served.url)
    assert ran.code == 0
    header, *messages = [
        msgspec.json.decode(line, type=wire.RecordingLine) for line in file.read_text().splitlines()
    ]
    assert isinstance(header, wire.RecordingHeader)
    assert header.source == served.url
    assert [m.seq for m in messages] == list(range(1, len(messages) + 1))
    assert isinstance(messages[1], wire.Snapshot)
    again = await run("record", str(file), "--url", served.url)
    assert (again.code, "exists already" in again.err) == (2, True)


async def test_reader_that_leaves_early_is_no_error(served: Served) -> None:
    command = " ".join([*VTOKEN, "policy list", "--url", served.url, "| head -1"])
    process = await asyncio.create_subprocess_shell(
        f"set -o pipefail; {command}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        executable="/bin/bash",
        env=environment(),
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert (process.returncode, err) == (0, b"")
    assert len(out.splitlines()) == 1


# ---------------------------------------------------------------- refusals


async def test_refusal_shows_field_value_and_bound(served: Served, core: CoreEngine) -> None:
    ran = await run("config", "set", "theta_f=2", "batch_size=4", "--url", served.url)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines()[1:] == [
        "  field: theta_f",
        "  value: 2",
        "  bound: a number in 0..1",
    ]
    assert core.runtime.config.batch_size == 32
    ran = await run("config", "set", "theta_f=2", "--json", "--url", served.url)
    problem = msgspec.json.decode(ran.err, type=wire.Problem)
    assert (problem.status, problem.field) == (422, "theta_f")


async def test_stale_revision_unknown_policy_and_unknown_request_are_refused(
    served: Served,
) -> None:
    url = ("--url", served.url)
    stale = await run("config", "set", "theta_f=0.5", "--if-revision", "9", *url)
    assert (stale.code, "412" in stale.err) == (1, True)
    policy = await run("policy", "use", "lru", *url)
    assert (policy.code, "field: policy.name" in policy.err) == (1, True)
    request = await run("compact", "--request", "nobody", *url)
    assert (request.code, "'nobody'" in request.err) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("config",),
        ("config", "set"),
        ("config", "set", "theta_f"),
        ("config", "set", "a=1", "a=2"),
        ("config", "set", "a=1", "a.b=2"),
        ("watch", "--interval", "0"),
        ("status", "--url", "localhost:8000"),
        ("status", "--token", "secret"),
        ("status", "--token-file", "/nowhere/token"),
    ],
    ids=" ".join,
)
async def test_wrong_command_lines_are_usage_errors(arguments: tuple[str, ...]) -> None:
    ran = await run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err


async def test_unreachable_server_says_what_to_do() -> None:
    for command in (("status",), ("watch",), ("events", "-f")):
        ran = await run(*command, "--url", "http://127.0.0.1:9")
        assert ran.code == 1
        assert "vtoken serve" in ran.err
        assert "Traceback" not in ran.err


async def test_server_without_vtoken_is_named_as_such(served: Served) -> None:
    ran = await run("status", "--url", f"{served.url}/v1")
    assert ran.code == 1
    assert "vToken is not on there" in ran.err


async def test_token_comes_from_the_environment_or_a_file(core: CoreEngine, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    async with serve(core.handle, api_key=["sesame"]) as served:
        url = ("--url", served.url)
        refused = await run("status", *url)
        assert (refused.code, "VTOKEN_TOKEN" in refused.err) == (1, True)
        assert (await run("status", *url, VTOKEN_TOKEN="sesame")).code == 0
        assert (await run("status", "--token-file", str(file), *url)).code == 0
        watch = ("watch", "--count", "1", *url)
        assert (await run(*watch, VTOKEN_TOKEN="sesame")).code == 0
        assert (await run(*watch, VTOKEN_TOKEN="wrong")).code == 1


# ---------------------------------------------------------------- doctor


async def test_doctor_tells_whether_eviction_and_reclamation_have_fired(
    served: Served, core: CoreEngine
) -> None:
    ran = await run("doctor", "--url", served.url)
    assert ran.code == 0
    assert "tokens evicted" in ran.out
    assert "paused: 0 blocks reclaimed" in ran.out
    assert "changes allowed" in ran.out
    core.runtime.counters.violations = 1
    ran = await run("doctor", "--json", "--url", served.url)
    findings = [msgspec.json.decode(line) for line in ran.out.splitlines()]
    assert [f["check"] for f in findings if f["verdict"] == "FAIL"] == ["invariants"]
    assert ran.code == 1


async def test_doctor_without_a_server_fails_and_says_what_to_do() -> None:
    ran = await run("doctor", "--url", "http://127.0.0.1:9")
    assert ran.code == 1
    assert "vtoken serve" in ran.out


# ---------------------------------------------------------------- what is elsewhere


def test_console_gets_its_server_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import vtoken_console.app

    seen: dict[str, object] = {}

    def run_console(url: str, **options: object) -> int:
        seen.update(options, url=url)
        return 7

    monkeypatch.setattr(vtoken_console.app, "run", run_console)
    monkeypatch.setenv("VTOKEN_TOKEN", "sesame")
    code = main(["console", "--url", "http://localhost:1/", "--read-only", "--fps", "5"])
    assert code == 7
    assert seen == {
        "url": "http://localhost:1",
        "token": "sesame",
        "read_only": True,
        "fps": 5.0,
        "ascii_only": False,
    }


def test_flags_behind_demo_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import vtoken.demo.run

    seen: list[str] = []
    monkeypatch.setattr(vtoken.demo.run, "main", lambda argv: seen.extend(argv) or 3)
    assert main(["demo", "--headless", "--", "--max-num-seqs=2"]) == 3
    assert seen == ["--headless", "--", "--max-num-seqs=2"]


# ---------------------------------------------------------------- start-up


async def test_help_and_version_import_nothing_heavy() -> None:
    version = await run("--version")
    assert version.out == f"vtoken {__version__}\n"
    assert (await run("--help")).code == 0
    code = (
        "import sys, contextlib; from vtoken.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "heavy = {'httpx', 'numpy', 'rich', 'textual', 'msgspec', 'websockets', 'vllm', 'torch'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
