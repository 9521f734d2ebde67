"""`vtoken console`: shows a server or a recording in the terminal, in a browser, or as a file.

The console is imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.base.hosts import is_loopback
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.remote import Remote
from vtoken.client import Server

if TYPE_CHECKING:
    from vtoken_console.frame.keys import Key


def console(
    remote: Remote,
    keys: bool,
    web: bool,
    host: str,
    port: int,
    export: str | None,
    size: tuple[int, int],
    no_motion: bool,
    recording: str | None,
    sample: bool,
    **view: Any,
) -> int:
    """Run until the user quits or the export is written. `view`: as of `vtoken_console.app.run`."""
    address = remote.address
    if sample:
        if recording is not None:
            raise UsageError("--sample is a recording itself", "leave --replay out")
        recording, view["guide"] = str(_sample()), "always"
    view["recording"] = file = None if recording is None else Path(recording)
    if view["moment"] is not None and recording is None:
        raise UsageError("--at needs a recording: --replay FILE, or --sample")
    if len(remote.servers) > 1 and address.engine is not None:
        raise UsageError("--engine is of one server", "name it with --url, or leave --engine out")
    if recording is not None and (address.urls or address.fleet is not None):
        raise UsageError("a recording is of one engine", "leave URL and --fleet out")
    bindings = _bindings(remote, listed=keys)
    if keys:
        return 0
    if file is not None:
        _check_recording(file)
    if web:
        return _serve(remote, host, port, view)
    if export is not None:
        return _export(remote, Path(export), size, view)
    _check_terminal()
    from vtoken_console.app.app import run

    return run(
        _source(remote, file),
        keys=bindings,
        motion=not no_motion,
        servers=_several(remote),
        **view,
    )


def _sample() -> Path:
    from vtoken_console.feed.replay import SAMPLE

    return SAMPLE


def _several(remote: Remote) -> list[Server]:
    """The servers of the fleet page; none if one is named, which the dashboard opens on."""
    return remote.servers if len(remote.servers) > 1 else []


def _source(remote: Remote, recording: Path | None) -> Server | str:
    return remote.client.server if recording is None else recording.name


def _bindings(remote: Remote, *, listed: bool) -> tuple[Key, ...]:
    """The user's key bindings; `listed`: also print them."""
    from vtoken_console.app.keyfile import KeyFileError, default_path, listing, load

    try:
        keys = load(default_path())
    except KeyFileError as error:
        raise UsageError(str(error)) from error
    if listed:
        remote.out.line(listing(keys))
        remote.out.line(f"\nto change them: {default_path()}, section [keys]")
    return keys


def _check_terminal() -> None:
    """Refuse a pipe, from which the user cannot quit. A browser has its own driver."""
    streams = (sys.stdin, sys.stdout)
    if "TEXTUAL_DRIVER" not in os.environ and not all(
        stream and stream.isatty() for stream in streams
    ):
        raise UsageError(
            "standard input and output must be a terminal",
            "use `vtoken watch`, or `vtoken console --export FILE`",
        )


def _check_recording(path: Path) -> None:
    from vtoken.recording import RecordingError, RecordingReader

    try:
        RecordingReader(path).close()
    except RecordingError as error:
        raise CommandError(str(error)) from error


def _export(remote: Remote, path: Path, size: tuple[int, int], view: dict[str, Any]) -> int:
    from vtoken_console.app.app import ConsoleApp
    from vtoken_console.output.export_run import ExportError, run
    from vtoken_console.style.appearance import choose

    recording, moment = view["recording"], view["moment"]
    app = ConsoleApp(
        _source(remote, recording),
        read_only=True,
        appearance=choose(view["theme"], _depth(view), ascii_only=view["ascii_only"]),
        recording=recording,
        moment=moment,
        servers=_several(remote),
    )
    try:
        for written in run(app, path, size):
            remote.out.line(str(written))
    except ExportError as error:
        raise CommandError(str(error)) from error
    return 0


def _depth(view: dict[str, Any]) -> str:
    """The colours of an export or a browser, which have no terminal to query."""
    colors: str = view["colors"]
    return "truecolor" if colors == "auto" else colors


def _serve(remote: Remote, host: str, port: int, view: dict[str, Any]) -> int:
    """Serve a page; each of its tabs runs `vtoken console` with what is given here."""
    try:
        from vtoken_console.output import web
        from vtoken_console.output.web_login import PageKeyError
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the module {error.name!r} is not installed", "pip install 'vtoken[web]'"
        ) from error
    if not is_loopback(host):
        raise UsageError(
            f"--host {host} is not loopback, and the page is not encrypted",
            "from another machine use: ssh -L 8001:127.0.0.1:8001 HOST",
        )
    address, several, token = remote.address, _several(remote), remote.client.server.token
    if several:  # tokens of the fleet file are read from it
        token = Server.from_environment(token_file=address.token_file).token
    has_token = any(server.token is not None for server in remote.servers)
    can_control = has_token and not view["read_only"]
    flags = {
        "--fleet": address.fleet,
        "--url": None if several else remote.client.server.url,
        "--cafile": address.cafile,
        "--engine": address.engine,
        "--fps": f"{view['fps']:g}",
        "--theme": view["theme"],
        "--colors": _depth(view),
        "--replay": view["recording"],
        "--at": view["moment"],
    }
    command = [sys.executable, "-m", "vtoken.cli", "console", *address.urls]
    for flag, value in flags.items():
        command += [] if value is None else [flag, str(value)]
    command += [] if can_control else ["--read-only"]
    try:
        return web.run(command, host=host, port=port, token=token, can_control=can_control)
    except PageKeyError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error}") from error
