"""Runs `vtoken`: in this process where only its words matter, as a process where that does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from vtoken.cli import main

VTOKEN = [sys.executable, "-m", "vtoken.cli"]
PATIENCE_S = 60.0


@dataclass
class Ran:
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def json(self, kind: Any) -> Any:
        """The one document on standard output."""
        (line,) = self.out.splitlines()
        return msgspec.json.decode(line, type=kind)


async def run(*arguments: str, **env: str) -> Ran:
    """Run a command to its end, in a thread of this process."""

    def call() -> int:
        try:
            return main(arguments)
        except SystemExit as end:
            return int(end.code or 0)

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VTOKEN_URL", "VTOKEN_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = await asyncio.wait_for(asyncio.to_thread(call), PATIENCE_S)
    return Ran(code, out.getvalue(), err.getvalue())


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would change a command."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VTOKEN", "VLLM"))}
    return inherited | more


async def start(*command: str, **env: str) -> asyncio.subprocess.Process:
    """A process, `vtoken` unless `command` begins with a path."""
    program = command if command and command[0].startswith("/") else (*VTOKEN, *command)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has put the tests into the background; what they start would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**env),
    )


async def spawn(*command: str, **env: str) -> Ran:
    """A process to its end; never leaves one behind."""
    process = await start(*command, **env)
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())
