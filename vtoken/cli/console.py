"""`vtoken console`: hands over to the console."""

from __future__ import annotations

from argparse import Namespace

from vtoken.client import Client


def console(arguments: Namespace, client: Client) -> int:
    from vtoken_console.app import run

    return run(
        client.server.url,
        token=client.server.token,
        read_only=arguments.read_only,
        fps=arguments.fps,
        ascii_only=arguments.ascii,
    )
