"""The servers that a command line names: one with `--url`, or several.

1. `--url`, else VTOKEN_URL, names one server. URLs after `vtoken console` and the lines of
   `--fleet` name several; they are not combined with `--url`, and VTOKEN_URL is not read.
2. A token comes from a server's line in the fleet file, else from `--token-file`, else from
   VTOKEN_TOKEN. `--cafile`, else VTOKEN_CAFILE, is for all servers.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from vtoken.cli.errors import UsageError
from vtoken.client import Server, read_fleet
from vtoken.client.fleet_file import check_distinct


def named_servers(arguments: Namespace) -> list[Server]:
    """At least one server. Raises UsageError, and RefusedError for an invalid address or file."""
    url, urls = getattr(arguments, "url", None), getattr(arguments, "urls", [])
    fleet = getattr(arguments, "fleet", None)
    named: dict[str, Any] = {
        "token_file": getattr(arguments, "token_file", None),
        "cafile": getattr(arguments, "cafile", None),
        "engine": getattr(arguments, "rank", None),
    }
    if not urls and fleet is None:
        return [Server.from_environment(url, **named)]
    if url is not None:
        raise UsageError(
            "--url names one server, and others are named too",
            "name all of them in one way: URL …, or --fleet FILE",
        )
    servers = [Server.from_environment(text, **named) for text in urls]
    if fleet is not None:
        servers += read_fleet(fleet, **named)
    check_distinct(servers)
    return servers
