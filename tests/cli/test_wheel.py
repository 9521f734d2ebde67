"""The wheel without an engine, as installed on a laptop for console and commands.

`make wheel` builds one and runs these; without `VTOKEN_WHEEL` they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_harness import Ran, spawn
from tests.support.serving import Served

WHEEL = os.environ.get("VTOKEN_WHEEL")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="no VTOKEN_WHEEL: `make wheel` runs them")


@pytest.fixture(scope="module")
def vtoken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command of a fresh environment that holds the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, folder], check=True)
    install = ["uv", "pip", "install", "-q", "--python", folder / "bin" / "python"]
    subprocess.run([*install, str(Path(str(WHEEL)).absolute())], check=True)
    return str(folder / "bin" / "vtoken")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the checkout off the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


async def done(*command: str) -> Ran:
    ran = await spawn(*command)
    assert ran.code == 0, ran.err
    return ran


@pytest.mark.usefixtures("stepping")
async def test_it_looks_at_a_server_and_replays_what_it_recorded(
    vtoken: str, served: Served, tmp_path: Path
) -> None:
    assert " blocks" in (await done(vtoken, "status", "--url", served.url)).out
    await done(vtoken, "record", "now.jsonl.gz", "--duration", "2", "--url", served.url)
    await done(vtoken, "console", "--replay", "now.jsonl.gz", "--export", "view.svg")
    assert "vToken" in (tmp_path / "view.svg").read_text()


async def test_it_plays_the_incident_that_comes_with_it(vtoken: str, tmp_path: Path) -> None:
    await done(vtoken, "console", "--sample", "--at", "90", "--export", "view.json")
    assert '"short_blocks"' in (tmp_path / "view.json").read_text()


async def test_what_needs_an_engine_says_so_and_not_more(vtoken: str) -> None:
    for command in ("serve", "demo"):
        ran = await spawn(vtoken, command, "MODEL")
        assert ran.code == 1
        assert "vtoken: the module 'vllm' is not installed" in ran.err
        assert len(ran.err.splitlines()) == 2
    assert "vLLM is not installed" in (await spawn(vtoken, "doctor")).out


async def test_benchmarks_are_in_the_repository_only(vtoken: str) -> None:
    for arguments in (["--help"], ["planner"]):
        ran = await spawn(vtoken, "bench", *arguments)
        assert ran.code == 1
        assert "the benchmarks are not part of the installed package" in ran.err
        assert "in a checkout of the repository" in ran.err


async def test_it_completes_commands_and_carries_its_types(vtoken: str) -> None:
    assert "vtoken" in (await done(vtoken, "completion", "bash")).out
    python = str(Path(vtoken).with_name("python"))
    typed = "import vtoken, vtoken_console as c; from pathlib import Path as P\n"
    typed += "assert all((P(m.__file__).parent / 'py.typed').is_file() for m in (vtoken, c))"
    await done(python, "-c", typed)
