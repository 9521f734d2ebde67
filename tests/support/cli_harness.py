"""Runs `vtoken`: in this process to check its output, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import click
import msgspec
import pytest

from tests.support.waiting import LIMIT_S
from vtoken.cli import main
from vtoken.cli.commands import cli

Url = tuple[str, str]
VTOKEN = [sys.executable, "-m", "vtoken.cli"]


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
        for name in ("VTOKEN_URL", "VTOKEN_TOKEN", "VTOKEN_CAFILE", "SSL_CERT_FILE"):
            patch.delenv(name, raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = await asyncio.wait_for(asyncio.to_thread(call), LIMIT_S)
    return Ran(code, out.getvalue(), err.getvalue())


def leaves(command: click.Command = cli, title: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its title; that of `config get` and the like has two words."""
    if not isinstance(command, click.Group):
        yield title, command
        return
    for name, below in command.commands.items():
        yield from leaves(below, f"{title} {name}".strip())


def parse(words: list[str]) -> None:
    """Parse the words behind `vtoken` and run nothing. Raises click.UsageError."""
    command: click.Command | None = cli
    context: click.Context | None = None
    while isinstance(command, click.Group):
        context = click.Context(command, context, **command.context_settings)
        name, command, words = command.resolve_command(context, words)
    assert command is not None
    command.make_context(name, words, context)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables that change a command."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VTOKEN", "VLLM"))}
    return inherited | more


async def start(*command: str, **env: str) -> asyncio.subprocess.Process:
    """A process, `vtoken` unless `command` begins with a path."""
    program = command if command and command[0].startswith("/") else (*VTOKEN, *command)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # If a shell runs the tests in the background, processes inherit ignored signals.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**env),
    )


async def spawn(*command: str, **env: str) -> Ran:
    """Run a process to its end; kill it on errors."""
    process = await start(*command, **env)
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    async def rest(self) -> str:
        """The output until the program closes the terminal."""
        with contextlib.suppress(OSError):  # Linux: EIO
            while data := await asyncio.to_thread(os.read, self._fd, 65536):
                self._seen += data
        return self._seen.decode()

    async def until(self, text: str) -> None:
        """Read until `text` appears."""
        async with asyncio.timeout(LIMIT_S):
            while text.encode() not in self._seen:
                self._seen += await asyncio.to_thread(os.read, self._fd, 65536)
        self._seen = self._seen.partition(text.encode())[2]


@contextlib.asynccontextmanager
async def terminal(*command: str, **env: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])",
        *command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(**{"TERM": "dumb", "PS1": "$ "} | env),
    )
    os.close(theirs)
    try:
        yield Terminal(ours)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(ours)
