"""The module of each command, imported only when the command runs.

A command is a function `(arguments, client) -> exit code`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module

from vtoken.cli.errors import UsageError, warn_ignored_token
from vtoken.cli.servers import named_servers
from vtoken.client import Client, OutcomeUnknown

LOOKUP_S = 300.0  # how long the outcome of a change is looked up if its answer is lost

MODULES = {
    "act": (
        *("config", "policy", "pause", "resume", "confirm", "undo", "sync"),
        *("compact", "forget", "end"),
    ),
    "see": ("status", "engines", "requests", "request", "block", "audit"),
    "streaming": ("watch", "events"),
    "record": ("record",),
    "doctor": ("doctor",),
    "console": ("console",),
    "mcp": ("mcp",),
    "completion": ("completion",),
}


def run(arguments: Namespace) -> int:
    """Run the given command; raises CommandError and the client's errors.

    `arguments.servers` are those that are named; a command that is not for all gets the first.
    """
    name = arguments.command
    arguments.servers = servers = named_servers(arguments)

    def tell(lost: OutcomeUnknown) -> None:
        if not arguments.json:  # then standard error holds problem documents only
            print(f"vtoken: {lost.problem.detail}\n  looking it up …", file=sys.stderr, flush=True)

    if getattr(arguments, "all", False):
        from vtoken.cli.every import every

        return every(arguments, lookup_s=LOOKUP_S, on_lookup=tell)
    if getattr(arguments, "fleet", None) is not None and name != "console":
        raise UsageError("--fleet names several servers", "add --all")
    (module,) = [module for module, names in MODULES.items() if name in names]
    command = getattr(import_module(f"vtoken.cli.{module}"), name)
    with Client(servers[0], lookup_s=LOOKUP_S, on_lookup=tell) as client:
        code: int = command(arguments, client)
        if client.token_ignored and not arguments.json:
            warn_ignored_token(client.server)
        return code
