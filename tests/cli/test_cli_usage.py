"""Wrong command lines, unreachable servers, tokens, help."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.cli_harness import VTOKEN, run, spawn
from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from vtoken import __version__
from vtoken.cli import main
from vtoken.client import Server
from vtoken.client.server import DEFAULT_URL
from vtoken_api.stream import endpoint


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("config", "set", "theta_f"),
        ("config", "set", "a=1", "a=2"),
        ("config", "set", "a=1", "a.b=2"),
        ("config", "set", "a=" + "[" * 100_000),
        ("status", "--url", "ftp://localhost:8000"),
        ("status", "--token", "secret"),
        ("status", "--token-file", "/nowhere/token"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
async def test_wrong_command_lines_are_usage_errors(arguments: tuple[str, ...]) -> None:
    ran = await run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err


async def test_server_without_vtoken_is_named_as_such(served: Served) -> None:
    ran = await run("status", "--url", f"{served.url}/v1")
    assert ran.code == 1
    assert "vToken is not enabled there" in ran.err


async def test_token_comes_from_the_environment_or_a_file(core: LiveEngine, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    async with serve(core.handle, api_key=["sesame"]) as served:
        url = ("--url", served.url)
        assert (await run("status", *url, VTOKEN_TOKEN="sesame")).code == 0
        assert (await run("status", "--token-file", str(file), *url)).code == 0
        watch = ("watch", "--count", "1", *url)
        assert (await run(*watch, VTOKEN_TOKEN="sesame")).code == 0


async def test_token_that_a_server_did_not_check_is_named(served: Served) -> None:
    said = f"vtoken: {served.url} has no tokens; it did not check the one of VTOKEN_TOKEN\n"
    for command in (("status",), ("status", "--all"), ("watch", "--count", "1"), ("doctor",)):
        assert (await run(*command, "--url", served.url, VTOKEN_TOKEN="any")).err == said
        assert (await run(*command, "--url", served.url)).err == ""
    ran = await run("status", "--json", "--url", served.url, VTOKEN_TOKEN="any")
    assert ran.err == ""


async def test_no_token_and_a_wrong_one_are_told_apart_and_at_once(
    core: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "AUTH_TIMEOUT_S", 3600.0)  # nobody waits for a token
    file = tmp_path / "token"
    file.write_text("wrong\n")
    export = ("console", "--export", str(tmp_path / "a.svg"))
    async with serve(core.handle, api_key=["sesame"]) as served:
        url = served.url
        for command in (("status",), ("watch",), export):
            for options, env, said in (
                ((), {}, f"{url} needs a token: VTOKEN_TOKEN, or --token-file FILE"),
                ((), {"VTOKEN_TOKEN": "wrong"}, f"{url} does not accept the token of VTOKEN_TOKEN"),
                (("--token-file", str(file)), {}, f"{url} does not accept the token of {file}"),
            ):
                ran = await run(*command, "--url", url, *options, **env)
                assert ran.code == 1
                prefix = "401: " if command is export else ""
                assert ran.err == f"vtoken: {prefix}{said}\n"


def test_console_gets_its_server_and_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vtoken_console.app.app

    seen: dict[str, object] = {}

    def run_console(server: Server, **options: object) -> int:
        seen.update(options, url=server.url, token=server.token, engine=server.engine)
        return 7

    monkeypatch.setattr(vtoken_console.app.app, "run", run_console)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("VTOKEN_TOKEN", "sesame")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code = main(["console", "--url", "http://localhost:1/", "--read-only", "--fps", "5", "--guide"])
    assert code == 7
    assert seen.pop("keys")
    assert seen == {
        "url": "http://localhost:1",
        "token": "sesame",
        "read_only": True,
        "fps": 5.0,
        "ascii_only": False,
        "guide": "always",
        "theme": "auto",
        "colors": "auto",
        "motion": True,
        "request": None,
        "recording": None,
        "moment": None,
        "engine": None,
        "servers": [],
    }


def test_broken_key_file_is_a_usage_error_that_names_the_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "vtoken" / "console.toml"
    file.parent.mkdir()
    file.write_text('[keys]\npause = "c"\n')
    assert main(["console", "--keys"]) == 2
    assert f"{file}, line 2: 'c' is bound to both" in capsys.readouterr().err
    file.write_text('[keys]\npause = "f5"\n')
    assert main(["console", "--keys"]) == 0
    assert "pause            f5" in capsys.readouterr().out


def test_flags_behind_demo_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import vtoken.demo.run

    seen: list[str] = []
    monkeypatch.setattr(vtoken.demo.run, "main", lambda argv: seen.extend(argv) or 3)
    assert main(["demo", "--headless", "--", "--max-num-seqs=2"]) == 3
    assert seen == ["--headless", "--", "--max-num-seqs=2"]


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


async def test_help_names_the_default_server() -> None:
    for command in ((), ("status",)):
        assert DEFAULT_URL in "".join((await run(*command, "--help")).out.split())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--json", "put --json after the command: vtoken COMMAND --json"),
        ("--verison", "Did you mean '--version'?"),
    ],
)
async def test_an_option_that_the_program_lacks_is_told_its_place_or_its_name(
    option: str, told: str
) -> None:
    ran = await run(option, "status")
    assert (ran.code, told in ran.err) == (2, True)


@pytest.mark.parametrize("command", ["", "status", "config set", "completion"])
async def test_help_is_a_word_too(command: str) -> None:
    words = command.split()
    helped = await run("help", *words)
    assert (helped.code, helped.out) == (0, (await run(*words, "--help")).out)
    assert helped.out == (await run(*words, "-h")).out
    assert f"Usage: {' '.join(['vtoken', *words])} " in helped.out


async def test_an_address_needs_no_scheme(served: Served) -> None:
    address = served.url.removeprefix("http://")
    assert (await run("config", "get", "theta_f", "--url", address)).out == "0.25\n"


async def test_console_without_a_terminal_is_refused_with_what_to_use_instead() -> None:
    ran = await spawn("console", "--url", "http://127.0.0.1:9")
    assert (ran.code, ran.out) == (2, "")
    assert "must be a terminal" in ran.err
    assert "--export" in ran.err


async def test_closed_standard_output_is_no_crash(served: Served) -> None:
    status = shlex.join([*VTOKEN, "status", "--url", served.url])
    ran = await spawn("/bin/sh", "-c", f"{status} >&-")
    assert (ran.code, ran.err) == (0, "")
