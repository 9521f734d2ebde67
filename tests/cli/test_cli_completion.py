"""Completion in real shells on a terminal: type the start of a line, press TAB and enter.

zsh and fish are tested if they are installed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.cli_harness import run, spawn, terminal
from tests.support.serving import Served
from vtoken import wire
from vtoken.cli.commands import KINDS, SHELLS
from vtoken.cli.completion import settings

# Completes as the real one does; run as a command, it shows how it was called.
STUB = """#!/bin/sh
[ -n "$_VTOKEN_COMPLETE" ] || [ "$1" = completion ] && exec {python} -m vtoken.cli "$@"
echo "CALLED[$*]"
"""
SET_UP = {
    "bash": (["--norc", "--noprofile", "-i"], "source <(vtoken completion bash)"),
    "zsh": (
        ["-f", "-i"],
        "autoload -Uz compinit && compinit -u -D && source <(vtoken completion zsh)",
    ),
    "fish": (["--no-config", "-i"], "vtoken completion fish | source"),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with the stub in front."""
    program = tmp_path / "vtoken"
    program.write_text(STUB.format(python=shlex.quote(sys.executable)))
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize("shell", SHELLS)
async def test_tab_completes_commands_fields_and_what_the_server_knows(
    shell: str, path: str, tmp_path: Path, served: Served
) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    flags, set_up = SET_UP[shell]
    env = {"PATH": path, "VTOKEN_URL": served.url, "HOME": str(tmp_path)}
    async with terminal(program, *flags, **env) as screen:
        screen.type(f"{set_up}; echo RE''ADY\n")
        await screen.until("READY")
        for begun, called in (
            ("vtoken sta\t", "status"),
            ("vtoken config set --confirm\t5m", "config set --confirm-within 5m"),
            ("vtoken config set theta\t0.5", "config set theta_f=0.5"),
            ("vtoken policy use stream\t", "policy use streaming_llm"),
        ):
            screen.type(f"{begun}\n")
            await screen.until(f"CALLED[{called}]")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("vtoken request ", ["a", "b"]),
        (
            "vtoken config set experiment.planner=p",
            ["plug", "pack"],  # what is in front of it, bash completes itself
        ),
        ("vtoken request --url http://127.0.0.1:9 ", []),
    ],
)
async def test_what_is_offered(line: str, offered: list[str], served: Served) -> None:
    env = {"_VTOKEN_COMPLETE": "bash_complete", "COMP_WORDS": line}
    ran = await spawn(VTOKEN_URL=served.url, **env)
    assert ran.err == ""
    assert ran.out.split() == [f"plain,{word}" for word in offered]


def test_fields_and_kinds_are_those_of_the_wire() -> None:
    assert {"theta_f", "policy.name", "probe.every_steps", "recycle"} <= set(settings())
    assert "planner" not in settings()
    assert set(KINDS) == set(wire.EventKind.__args__)  # type: ignore[attr-defined]


async def test_script_for_an_unknown_shell_is_a_usage_error() -> None:
    ran = await run("completion", "powershell")
    assert (ran.code, ran.out) == (2, "")
    assert "'bash', 'zsh', 'fish'" in ran.err
