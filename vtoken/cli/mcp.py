"""`vtoken mcp`: serves the Model Context Protocol on standard input and output, for agents."""

from __future__ import annotations

from vtoken import wire
from vtoken.cli.errors import CommandError
from vtoken.cli.remote import Remote
from vtoken.client import Client


def mcp(remote: Remote) -> None:
    """Serve until standard input ends. Tools that change something need a control token."""
    client = remote.client
    try:
        from vtoken.cli.mcp_server import build
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the module {error.name!r} is not installed", "pip install 'vtoken[mcp]'"
        ) from error
    build(client.server, can_control=_can_control(client)).run("stdio")


def _can_control(client: Client) -> bool:
    """Whether there is a token and the server grants control to it."""
    if client.server.token is None:
        return False
    with client.stream(["metrics"], format="json") as stream:
        hello = next(iter(stream))
    return isinstance(hello, wire.Hello) and hello.can_control
