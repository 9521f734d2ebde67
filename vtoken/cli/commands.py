"""The commands: each asks the server, prints what it answered, returns the exit code.

Knows the link and how documents look. `--json` prints the server's documents as they are.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from vtoken import wire
from vtoken.cli.doctor import doctor
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.link import Link, token_of, url_of
from vtoken.cli.record import record
from vtoken.cli.show import (
    config_lines,
    operation_lines,
    patch_lines,
    policy_lines,
    say,
    say_json,
    status_lines,
)
from vtoken.cli.streaming import events, watch

POLL_S = (0.02, 0.5)  # shortest and longest wait between two looks at an operation


def _print(arguments: Namespace, document: Any, lines: Callable[[Any], list[str]]) -> None:
    if arguments.json:
        say_json(document)
        return
    for line in lines(document):
        say(line)


def status(arguments: Namespace) -> int:
    _print(arguments, Link(arguments).call(wire.Status, "GET", "/status"), status_lines)
    return 0


def config(arguments: Namespace) -> int:
    if arguments.action == "set":
        patch = parse_values(arguments.values)
        return _patch(arguments, patch, arguments.dry_run, arguments.if_revision)
    document = Link(arguments).call(wire.ConfigDocument, "GET", "/config")
    _print(arguments, document, config_lines)
    return 0


def policy(arguments: Namespace) -> int:
    if arguments.action == "use":
        choice: dict[str, Any] = {"name": arguments.name}
        if arguments.values:
            choice["params"] = parse_values(arguments.values)
        return _patch(arguments, {"policy": choice}, arguments.dry_run)
    document = Link(arguments).call(list[wire.PolicyInfo], "GET", "/policies")
    _print(arguments, document, policy_lines)
    return 0


def pause(arguments: Namespace) -> int:
    return _patch(arguments, {"reclamation": "paused"})


def resume(arguments: Namespace) -> int:
    return _patch(arguments, {"reclamation": "auto"})


def undo(arguments: Namespace) -> int:
    _print(arguments, Link(arguments).call(wire.PatchResult, "POST", "/undo"), patch_lines)
    return 0


def compact(arguments: Namespace) -> int:
    """Starts a compaction and waits until it is over."""
    link = Link(arguments)
    body: dict[str, Any] = {"dry_run": arguments.dry_run}
    if arguments.request is not None:
        body["request_id"] = arguments.request
    if arguments.batch_size is not None:
        body["batch_size"] = arguments.batch_size
    operation = link.call(wire.Operation, "POST", "/compactions", body=body)
    deadline, pause_s = time.monotonic() + arguments.timeout, POLL_S[0]
    while operation.state in ("pending", "running"):
        if time.monotonic() > deadline:
            raise CommandError(
                f"operation {operation.id} is still {operation.state} after "
                f"{arguments.timeout:g} s",
                "it goes on in the server; an engine without requests takes no steps",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S[1])
        path = f"/operations/{quote(operation.id, safe='')}"
        operation = link.call(wire.Operation, "GET", path)
    _print(arguments, operation, operation_lines)
    return 0 if operation.state == "done" else 1


def console(arguments: Namespace) -> int:
    url, token = url_of(arguments), token_of(arguments)
    from vtoken_console.app import run

    return run(
        url,
        token=token,
        read_only=arguments.read_only,
        fps=arguments.fps,
        ascii_only=arguments.ascii,
    )


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "status": status,
    "watch": watch,
    "config": config,
    "policy": policy,
    "compact": compact,
    "pause": pause,
    "resume": resume,
    "undo": undo,
    "events": events,
    "record": record,
    "doctor": doctor,
    "console": console,
}


def parse_values(pairs: list[str]) -> dict[str, Any]:
    """`a.b=1 c=text` as {"a": {"b": 1}, "c": "text"}: a value is JSON, or else text."""
    tree: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise UsageError(f"{pair!r} is not KEY=VALUE")
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UsageError(f"{key!r} is given twice")
        if path[-1] in node:
            raise UsageError(f"{key!r} is given twice")
        try:
            node[path[-1]] = json.loads(text)
        except ValueError:
            node[path[-1]] = text
    return tree


def _patch(
    arguments: Namespace,
    patch: dict[str, Any],
    dry_run: bool = False,
    revision: int | None = None,
) -> int:
    result = Link(arguments).call(
        wire.PatchResult,
        "PATCH",
        "/config",
        body=patch,
        params={"validate_only": "true"} if dry_run else None,
        headers=None if revision is None else {"If-Match": f'"{revision}"'},
    )
    _print(arguments, result, patch_lines)
    return 0
