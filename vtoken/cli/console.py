"""`vtoken console`: shows a server or a recording in the terminal, in a browser, or as a file.

The console is imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from vtoken.base.hosts import is_loopback
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.printing import print_text
from vtoken.client import Client, Server

if TYPE_CHECKING:
    from vtoken_console.frame.keys import Key


def console(arguments: Namespace, client: Client) -> int:
    """Run until the user quits or the export is written."""
    if arguments.at is not None and arguments.replay is None:
        raise UsageError("--at needs a recording: --replay FILE")
    if len(arguments.servers) > 1 and arguments.rank is not None:
        raise UsageError("--engine is of one server", "name it with --url, or leave --engine out")
    if arguments.replay is not None and (arguments.urls or arguments.fleet is not None):
        raise UsageError("a recording is of one engine", "leave URL and --fleet out")
    keys = _keys(arguments)
    if arguments.keys:
        return 0
    if arguments.replay is not None:
        _check_recording(Path(arguments.replay))
    if arguments.web:
        return _serve(arguments, client)
    if arguments.export is not None:
        return _export(arguments, client)
    _check_terminal()
    from vtoken_console.app.app import run

    return run(
        _source(arguments, client),
        read_only=arguments.read_only,
        fps=arguments.fps,
        ascii_only=arguments.ascii,
        recording=_recording(arguments),
        moment=arguments.at,
        theme=arguments.theme,
        colors=arguments.colors,
        motion=not arguments.no_motion,
        guide=arguments.guide,
        keys=keys,
        servers=_several(arguments),
    )


def _several(arguments: Namespace) -> list[Server]:
    """The servers of the fleet page; none if one is named, which the dashboard opens on."""
    servers: list[Server] = arguments.servers
    return servers if len(servers) > 1 else []


def _keys(arguments: Namespace) -> tuple[Key, ...]:
    """The user's key bindings; prints them with `--keys`."""
    from vtoken_console.app.keyfile import KeyFileError, default_path, listing, load

    try:
        keys = load(default_path())
    except KeyFileError as error:
        raise UsageError(str(error)) from error
    if arguments.keys:
        print(listing(keys))
        print(f"\nto change them: {default_path()}, section [keys]")
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


def _recording(arguments: Namespace) -> Path | None:
    return None if arguments.replay is None else Path(arguments.replay)


def _source(arguments: Namespace, client: Client) -> Server | str:
    recording = _recording(arguments)
    return client.server if recording is None else recording.name


def _export(arguments: Namespace, client: Client) -> int:
    from vtoken_console.app.app import ConsoleApp
    from vtoken_console.output.export_run import ExportError, run
    from vtoken_console.style.appearance import choose

    app = ConsoleApp(
        _source(arguments, client),
        read_only=True,
        appearance=choose(arguments.theme, _colors(arguments), ascii_only=arguments.ascii),
        recording=_recording(arguments),
        moment=arguments.at,
        servers=_several(arguments),
    )
    try:
        for path in run(app, Path(arguments.export), arguments.size):
            print_text(str(path))
    except ExportError as error:
        raise CommandError(str(error)) from error
    return 0


def _colors(arguments: Namespace) -> str:
    """The colours of an export or a browser, which have no terminal to query."""
    colors: str = arguments.colors
    return "truecolor" if colors == "auto" else colors


def _serve(arguments: Namespace, client: Client) -> int:
    try:
        from vtoken_console.output import web
        from vtoken_console.output.web_login import PageKeyError
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the module {error.name!r} is not installed", "pip install 'vtoken[web]'"
        ) from error
    if not is_loopback(arguments.host):
        raise UsageError(
            f"--host {arguments.host} is not loopback, and the page is not encrypted",
            "from another machine use: ssh -L 8001:127.0.0.1:8001 HOST",
        )
    servers = _several(arguments)
    token = client.server.token
    has_token = any(server.token is not None for server in arguments.servers)
    can_control = has_token and not arguments.read_only
    command = [sys.executable, "-m", "vtoken.cli", "console"]
    if servers:  # tokens of the fleet file are read from it
        token = Server.from_environment(token_file=arguments.token_file).token
        command += arguments.urls
        command += ["--fleet", arguments.fleet] if arguments.fleet is not None else []
    else:
        command += ["--url", client.server.url]
    command += ["--cafile", arguments.cafile] if arguments.cafile is not None else []
    command += [] if client.server.engine is None else ["--engine", f"{client.server.engine}"]
    command += ["--fps", f"{arguments.fps:g}", "--theme", arguments.theme]
    command += ["--colors", _colors(arguments)]
    command += [] if can_control else ["--read-only"]
    command += ["--replay", arguments.replay] if arguments.replay is not None else []
    command += ["--at", arguments.at] if arguments.at is not None else []
    try:
        return web.run(
            command, host=arguments.host, port=arguments.port, token=token, can_control=can_control
        )
    except PageKeyError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"cannot listen on {arguments.host}:{arguments.port}: {error}"
        ) from error
