"""The commands on a server with several engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.support.cli_harness import run
from tests.support.core.live import LiveEngine
from tests.support.routes import token_files
from tests.support.served_core import THETA_F, several
from tests.support.serving import Served
from vtoken import wire
from vtoken.cli import main
from vtoken.cli.every import FleetReport


@pytest.fixture
async def two() -> AsyncIterator[tuple[Served, list[LiveEngine]]]:
    async with several(2) as found:
        yield found


def thetas(cores: list[LiveEngine]) -> list[float]:
    return [core.runtime.config.theta_f for core in cores]


async def test_a_change_is_made_on_all_engines_or_on_the_named_one(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    (served, cores), url = two, ("--url", two[0].url)
    ran = await run("config", "set", "theta_f=0.5", *url)
    assert ran.out.splitlines()[-1] == "on engines 0, 1"
    assert thetas(cores) == [0.5, 0.5]
    ran = await run("config", "set", "theta_f=0.75", "--engine", "1", *url)
    assert "on engines" not in ran.out
    assert thetas(cores) == [0.5, 0.75]
    ran = await run("compact", "--dry-run", *url)
    assert ran.code == 0
    assert len(served.calls_of("compact")) == 1


async def test_engines_tells_who_differs_and_sync_ends_it(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    (_, cores), url = two, ("--url", two[0].url)
    ran = await run("engines", *url)
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "2 engines, all answer and run the same configuration"
    await run("config", "set", "theta_f=0.5", "--engine", "1", *url)
    ran = await run("engines", *url)
    assert ran.code == 1
    assert "differs in theta_f" in ran.out
    verdict = ran.out.splitlines()[-1]
    assert " changed theta_f on engine 1 only, " in verdict
    assert verdict.endswith(" ago: vtoken sync --engine 1, or vtoken undo --engine 1")
    found = (await run("engines", "--json", *url)).json(wire.Fleet)
    assert not found.ok
    ran = await run("sync", "--dry-run", "--engine", "0", *url)
    assert "theta_f: 0.5 -> 0.25" in ran.out
    assert thetas(cores) == [THETA_F, 0.5]
    assert (await run("sync", "--engine", "0", *url)).code == 0
    assert thetas(cores) == [THETA_F, THETA_F]
    again = await run("sync", *url)
    assert again.code == 1
    assert "all engines have the same configuration" in again.err


async def test_reading_names_its_engine_and_finds_requests_anywhere(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    url = ("--url", two[0].url)
    listed = (await run("requests", *url)).out.splitlines()
    assert sorted(line.split()[:2] for line in listed[1:3]) == [["0", "r0"], ["1", "r1"]]
    assert (await run("status", "--engine", "1", *url)).code == 0
    assert "r1" in (await run("requests", "--engine", "1", *url)).out
    assert (await run("request", "r1", *url)).code == 0
    checked = await run("doctor", "-v", "--engine", "1", *url)
    assert (checked.code, " 1: " in checked.out, " 0: " in checked.out) == (0, True, False)
    for command in ("status", "doctor"):
        missing = await run(command, "--engine", "7", *url)
        assert (missing.code, "no engine 7" in missing.err + missing.out) == (1, True)


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[tuple[Path, list[Served], list[LiveEngine]]]:
    """A fleet file with a server of two engines, one of one engine, and one that needs a token."""
    files = token_files(tmp_path, read=True, control=True)
    async with (
        several(2) as (gpu7, cores),
        several(1) as (gpu8, more),
        several(1, **files) as (gpu9, last),
    ):
        file = tmp_path / "all.fleet"
        file.write_text(
            f"# production\n{gpu7.url}  name=gpu7\n\n{gpu8.url} name=gpu8\n"
            f"{gpu9.url} name=gpu9 token-file=control\n"
        )
        yield file, [gpu7, gpu8, gpu9], [*cores, *more, *last]


async def test_status_of_all_is_a_table_and_one_verdict(
    three: tuple[Path, list[Served], list[LiveEngine]],
) -> None:
    file, _, cores = three
    ran = await run("status", "--all", "--fleet", str(file))
    lines = ran.out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["gpu7/0", "gpu7/1", "gpu8", "gpu9"]
    assert lines[-1] == "4 engines, all answer and run the same configuration"
    assert ran.code == 0
    cores[2].call("patch_config", patch={"theta_f": 0.5})
    ran = await run("status", "--all", "--fleet", str(file))
    assert ran.code == 1
    verdict = ran.out.splitlines()[-1]
    assert verdict == "gpu8 differs from the others: theta_f 0.5 where the others have 0.25"
    report = (await run("status", "--all", "--json", "--fleet", str(file))).json(FleetReport)
    assert (report.ok, report.sentence) == (False, verdict)
    assert [len(server.engines) for server in report.servers] == [2, 1, 1]


async def test_a_change_of_all_goes_on_where_servers_fail_and_each_says_why(
    three: tuple[Path, list[Served], list[LiveEngine]], tmp_path: Path
) -> None:
    file, _, cores = three
    wrong = tmp_path / "wrong"
    wrong.write_text("fedcba9876543210")
    text = file.read_text().replace("token-file=control", "token-file=wrong")
    file.write_text(text + "http://127.0.0.1:9 name=gone\n")
    ran = await run("config", "set", "theta_f=0.5", "--all", "--fleet", str(file))
    assert ran.code == 1
    assert thetas(cores) == [0.5, 0.5, 0.5, THETA_F]
    rows = {line.split()[0]: line for line in ran.out.splitlines()[:-1]}
    assert "0, 1" in rows["gpu7"]
    assert "theta_f: 0.25 -> 0.5; " in rows["gpu8"]
    assert "FAILED: 401" in rows["gpu9"]
    assert "FAILED: cannot reach" in rows["gone"]
    assert "answered by 2 of 4 servers" in ran.out
    assert ran.out.splitlines()[-1].startswith("gpu9 does not answer: 401")
    ran = await run("undo", "--all", "--dry-run", "--fleet", str(file))
    assert "theta_f: 0.5 -> 0.25; " in ran.out
    assert "dry run: nothing was changed" in ran.out


async def test_a_missing_engine_and_a_refused_value_are_rows_of_their_server(
    three: tuple[Path, list[Served], list[LiveEngine]],
) -> None:
    file, _, cores = three
    ran = await run("status", "--all", "--engine", "1", "--fleet", str(file))
    assert ran.code == 1
    rows = [line.split()[0] for line in ran.out.splitlines()[1:-1]]
    assert rows == ["gpu7", "gpu8", "gpu9"]
    assert ran.out.count("422: no engine 1") == 3  # two rows and the verdict
    ran = await run("config", "set", "theta_f=2", "--all", "--fleet", str(file))
    assert ran.code == 1
    assert ran.out.splitlines()[-1].startswith("gpu7 refuses: 422")
    assert thetas(cores) == [THETA_F] * 4


async def test_all_of_one_server_is_its_engines(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    ran = await run("pause", "--all", "--url", two[0].url)
    assert ran.out.splitlines()[-1] == "2 engines, all answer and run the same configuration"
    assert ran.code == 0


async def test_status_of_a_server_with_several_engines_is_the_table_of_all(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    url = ("--url", two[0].url)
    every = await run("engines", *url)
    ran = await run("status", *url)
    assert ran.out == every.out + "one of them in full: vtoken status --engine N\n"
    assert (ran.code, ran.err) == (0, "")
    assert (await run("status", "--engine", "1", *url)).out.startswith("OK: ")
    two[1][1].call("patch_config", patch={"theta_f": 0.5})
    assert (await run("status", *url)).code == 1
    for command in ("requests --json", "block 1", "config get", "status --json"):
        ran = await run(*command.split(), *url)
        assert ran.code == 1
        assert "engine" in ran.err
        assert "--json" in command or "name one with --engine N; see: vtoken engines" in ran.err


def leave_out(served: Served, name: str) -> None:
    """Answer without the field `name` of documents. No call may have been answered yet."""

    async def without(request: Request, call_next: Any) -> Response:
        response = await call_next(request)
        parts = [part async for part in response.body_iterator]
        document = msgspec.json.decode(b"".join(parts))
        for engine in document.get("engines", []):
            engine["status"].pop(name, None)
        return JSONResponse(document, response.status_code, media_type=response.media_type)

    served.app.middleware("http")(without)


async def test_a_server_of_other_fields_is_a_row_that_says_so_and_makes_changes(
    tmp_path: Path,
) -> None:
    async with several(2) as (new, cores), several(1) as (other, more):
        leave_out(other, "blocks")
        file = tmp_path / "all.fleet"
        file.write_text(f"{new.url} name=new\n{other.url} name=other\n")
        ran = await run("status", "--all", "--fleet", str(file))
        rows = {line.split()[0]: line for line in ran.out.splitlines()[1:-1]}
        assert list(rows) == ["new/0", "new/1", "other"]
        assert f"FAILED: GET {other.url}/vtoken/v1/engines: the answer does not" in rows["other"]
        assert "`blocks`" in rows["other"]
        assert ran.code == 1
        ran = await run("config", "set", "theta_f=0.5", "--all", "--fleet", str(file))
        assert thetas([*cores, *more]) == [0.5] * 3
        rows = {line.split()[0]: line for line in ran.out.splitlines()[1:-1]}
        assert "theta_f: 0.25 -> 0.5; " in rows["other"]
        assert "; then FAILED: GET" in rows["other"]
        assert ran.code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "--fleet", "FILE"), "add --all"),
        (
            ("status", "--all", "--fleet", "FILE", "--url", "http://h"),
            "name all of them in one way",
        ),
        (("pause", "--all", "--fleet", "nowhere"), "cannot read the fleet file"),
        (
            ("undo", "--all", "--fleet", "FILE", "--if-revision", "2"),
            "--if-revision is about one server",
        ),
        (("console", "http://h", "--url", "http://h"), "name all of them in one way"),
        (("console", "http://h", "http://h/"), "http://h is named twice"),
        (("console", "http://h", "--fleet", "FILE", "--engine", "1"), "--engine is of one server"),
    ],
)
async def test_ways_to_name_servers_that_contradict_are_refused_before_a_call(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "x.fleet"
    file.write_text("http://a\nhttp://b\n")
    ran = await run(*(str(file) if word == "FILE" else word for word in arguments))
    assert ran.code == 2
    assert message in ran.err


def test_console_in_a_browser_reads_tokens_from_the_fleet_file_and_has_none_in_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vtoken_console.output import web

    seen: dict[str, Any] = {}

    def run_web(command: list[str], **options: Any) -> int:
        seen.update(options, command=command)
        return 0

    monkeypatch.setattr(web, "run", run_web)
    monkeypatch.delenv("VTOKEN_TOKEN", raising=False)
    (tmp_path / "a.token").write_text("of-server-a-alone")
    file = tmp_path / "x.fleet"
    file.write_text("http://a token-file=a.token\nhttp://b\n")
    assert main(["console", "http://c", "--fleet", str(file), "--web"]) == 0
    assert seen["command"][4:7] == ["http://c", "--fleet", str(file)]
    assert not any("of-server-a" in word for word in seen["command"])
    assert (seen["token"], seen["can_control"]) == (None, True)


async def test_change_is_tried_on_one_engine_first(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    (_, cores), url = two, ("--url", two[0].url)
    change = ("config", "set", "theta_f=0.5", "--canary-engine", "1")
    ran = await run(*change, *url)
    assert ran.code == 1
    assert "nothing would decide whether the other engines follow" in ran.err
    ran = await run(*change, "--guard", "preemptions>0", "--guard-for", "5m", *url)
    assert ran.code == 0
    assert "when the trial has ended well, it is made on engine 0" in ran.out
    assert thetas(cores) == [THETA_F, 0.5]
    assert (await run("confirm", "--engine", "1", *url)).code == 0
