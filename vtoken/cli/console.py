"""`vtoken console`: on a server, or on a recording.

Knows which console the arguments ask for; imports it when it is asked for.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from vtoken.cli.errors import CommandError, UsageError
from vtoken.client import Client


def console(arguments: Namespace, client: Client) -> int:
    """Runs until it is left."""
    if arguments.at is not None and arguments.replay is None:
        raise UsageError("--at is a moment of a recording: it needs --replay FILE")
    if arguments.replay is not None:
        return _replay(arguments)
    from vtoken_console.app import run

    return run(
        client.server.url,
        token=client.server.token,
        read_only=arguments.read_only,
        fps=arguments.fps,
        ascii_only=arguments.ascii,
        theme=arguments.theme,
        colors=arguments.colors,
        motion=not arguments.no_motion,
    )


def _replay(arguments: Namespace) -> int:
    from vtoken.recording import RecordingError, RecordingReader

    path = Path(arguments.replay)
    try:
        RecordingReader(path).close()
    except RecordingError as error:
        raise CommandError(str(error)) from error
    from vtoken_console.app import run

    return run(
        path.name,
        token=None,
        read_only=True,
        fps=arguments.fps,
        ascii_only=arguments.ascii,
        recording=path,
        moment=arguments.at,
    )
