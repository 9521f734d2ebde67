"""`vtoken console`: on a server, or on a recording.

Knows which console the arguments ask for; imports it when it is asked for.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from vtoken.cli.errors import CommandError, UsageError
from vtoken.client import Client

if TYPE_CHECKING:
    from vtoken_console.keys import Key


def console(arguments: Namespace, client: Client) -> int:
    """Runs until it is left."""
    if arguments.at is not None and arguments.replay is None:
        raise UsageError("--at is a moment of a recording: it needs --replay FILE")
    from vtoken_console.keyfile import KeyFileError, default_path, listing, load

    try:
        keys = load(default_path())
    except KeyFileError as error:
        raise UsageError(str(error)) from error
    if arguments.keys:
        print(listing(keys))
        print(f"\nof your own: {default_path()}, section [keys]")
        return 0
    if arguments.replay is not None:
        return _replay(arguments, keys)
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
        guide=arguments.guide,
        keys=keys,
    )


def _replay(arguments: Namespace, keys: tuple[Key, ...]) -> int:
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
        keys=keys,
        recording=path,
        moment=arguments.at,
        theme=arguments.theme,
        colors=arguments.colors,
        motion=not arguments.no_motion,
    )
