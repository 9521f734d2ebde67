"""`vtoken status --check`: the worst engine in one line, and an exit code for scripts.

2: memory is short, or the engine does not answer; 1: memory is nearly short; 0: neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vtoken import wire
from vtoken.cli.errors import failure_of
from vtoken.cli.printing import coloured
from vtoken.cli.remote import Remote
from vtoken.client import Client, ProblemError
from vtoken.client.server import Server
from vtoken.sentences.situation import level

CODES = {"short": 2, "near": 1, None: 0}
COLOURS = ("ok", "fragmented", "full")


class Checked(NamedTuple):
    """One engine; `name`: "" if it is the only one. `status`: None if it does not answer."""

    code: int
    name: str
    text: str
    status: wire.Status | None = None


def checked(remote: Remote) -> int:
    """Print the worst of the engines that the command is about; returns its code."""
    servers = remote.servers if remote.every else remote.servers[:1]
    found = [one for server in servers for one in _of_server(server, several=len(servers) > 1)]
    worst = max(found, key=lambda one: one.code)
    if remote.out.as_json and worst.status is not None:
        remote.out.show(worst.status, lambda _: ())
    else:
        name = f"{worst.name}: " if len(found) > 1 else ""
        remote.out.part(coloured(f"{name}{worst.text}", COLOURS[worst.code]))
    return worst.code


def _of_server(server: Server, *, several: bool) -> Iterator[Checked]:
    try:
        with Client(server) as client:
            rows = client.engines().engines
            if server.engine is not None:
                rows = [row for row in rows if row.engine == server.engine]
                client.status()  # the server's own refusal, if it has no such engine
    except ProblemError as error:
        yield Checked(2, server.label, failure_of(error).message)
        return
    for row in rows:
        name = f"{server.label}/{row.engine}" if several else f"engine {row.engine}"
        if row.status is None or row.problem:
            yield Checked(2, name, row.problem or "no status yet")
            continue
        advised = [one.text for one in row.status.advice if one.level != "note"]
        sentence = row.status.fragmentation.sentence.removesuffix(".")
        text = "; ".join([sentence, *advised[:1]])
        yield Checked(CODES[level(row.status)], name, text, row.status)
