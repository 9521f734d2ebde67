"""The module of each command, imported only when the command runs.

A command is a function `(arguments, client) -> exit code`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module

from vtoken.client import Client, OutcomeUnknown, Server

LOOKUP_S = 300.0  # how long the outcome of a change is looked up if its answer is lost

MODULES = {
    "act": ("config", "policy", "pause", "resume", "confirm", "undo", "sync", "compact", "forget"),
    "see": ("status", "engines", "requests", "request", "block", "audit"),
    "streaming": ("watch", "events"),
    "record": ("record",),
    "doctor": ("doctor",),
    "console": ("console",),
    "mcp": ("mcp",),
    "completion": ("completion",),
}


def run(arguments: Namespace) -> int:
    """Run the given command; raises CommandError and the client's errors."""
    name = arguments.command
    (module,) = [module for module, names in MODULES.items() if name in names]
    command = getattr(import_module(f"vtoken.cli.{module}"), name)
    url, token_file = getattr(arguments, "url", None), getattr(arguments, "token_file", None)
    rank = getattr(arguments, "rank", None)
    server = Server.from_environment(url, token_file=token_file, engine=rank)

    def tell(lost: OutcomeUnknown) -> None:
        if not arguments.json:  # then standard error holds problem documents only
            print(f"vtoken: {lost.problem.detail}\n  looking it up …", file=sys.stderr, flush=True)

    with Client(server, lookup_s=LOOKUP_S, on_lookup=tell) as client:
        code: int = command(arguments, client)
        return code
