"""The commands that change something, and `compact`; each prints the engine's answer.

`--json` prints the server's documents unchanged.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import accumulate
from typing import Any

from vtoken import wire
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.printing import print_document
from vtoken.cli.see import config_get, policies
from vtoken.cli.show import confirm_lines, operation_lines, patch_lines
from vtoken.cli.show_requests import ended_lines, forgotten_lines
from vtoken.cli.values import assignments
from vtoken.client import Client, calls
from vtoken.client.calls import Call
from vtoken.client.request_text import RequestText


def config(arguments: Namespace, client: Client) -> int:
    if arguments.action == "get":
        return config_get(arguments, client)
    return _change(arguments, client)


def policy(arguments: Namespace, client: Client) -> int:
    if arguments.action == "list":
        return policies(arguments, client)
    return _change(arguments, client)


def pause(arguments: Namespace, client: Client) -> int:
    return _change(arguments, client)


def resume(arguments: Namespace, client: Client) -> int:
    return _change(arguments, client)


def undo(arguments: Namespace, client: Client) -> int:
    return _change(arguments, client)


def confirm(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.send(change(arguments)), confirm_lines)
    return 0


def change(arguments: Namespace) -> Call[wire.PatchResult]:
    """The call of a command that changes the configuration."""
    match arguments.command:
        case "config":
            return _patch(arguments, _tree(arguments.values))
        case "policy":
            params = {"params": _tree(arguments.values)} if arguments.values else {}
            return _patch(arguments, {"policy": {"name": arguments.name, **params}})
        case "pause":
            return _patch(arguments, {"reclamation": "paused"})
        case "resume":
            return _patch(arguments, {"reclamation": "auto"})
        case "undo":
            return calls.undo(revision=arguments.if_revision, validate_only=arguments.dry_run)
        case "confirm":
            return calls.confirm(revision=arguments.if_revision, validate_only=arguments.dry_run)
    raise AssertionError(arguments.command)


def sync(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.sync(validate_only=arguments.dry_run), patch_lines)
    return 0


def compact(arguments: Namespace, client: Client) -> int:
    """Start a compaction and wait for its end."""
    operation = client.compact(
        request_id=arguments.request,
        batch_size=arguments.batch_size,
        dry_run=arguments.dry_run,
    )
    if operation.state in ("pending", "running"):
        operation = client.wait_operation(operation.id, timeout_s=arguments.timeout)
    if operation.state in ("pending", "running"):
        raise CommandError(
            f"operation {operation.id} is still {operation.state} after {arguments.timeout:g} s",
            "it continues on the server; an engine without requests takes no steps",
        )
    print_document(arguments, operation, operation_lines)
    return 0 if operation.state == "done" else 1


def forget(arguments: Namespace, client: Client) -> int:
    """Forget spans that are given as positions, or the tokens of a text."""
    numbers, text = arguments.positions, arguments.text
    if len(numbers) % 2 or (not numbers) == (text is None):
        raise UsageError("name either START END, one pair for each span, or --text TEXT")
    spans = list(zip(numbers[::2], numbers[1::2], strict=True))
    if text is not None:
        spans = [_span_of(text, arguments.id, client)]
    print_document(arguments, client.forget(arguments.id, spans), forgotten_lines)
    return 0


def end(arguments: Namespace, client: Client) -> int:
    """End a session."""
    print_document(arguments, client.end(arguments.id), ended_lines)
    return 0


def _span_of(text: str, request_id: str, client: Client) -> tuple[int, int]:
    """The tokens that lie entirely in the only occurrence of `text`.

    A token without a piece of its own begins a character of the next one.
    """
    shown = RequestText(request_id)
    client.refresh_text(shown, 0, 0)
    pieces = ["\0" if token.text is None else token.text for token in shown.tokens]
    whole = "".join(pieces)
    found = whole.count(text) if text else 0
    if found != 1:
        raise CommandError(
            f"the text occurs {found:,} times in {request_id}",
            "name a text that occurs once, or the positions of its tokens",
        )
    first = whole.index(text)
    ends = [0, *accumulate(map(len, pieces))]
    inside = [i for i in range(len(pieces)) if first <= ends[i] < ends[i + 1] <= first + len(text)]
    if not inside:
        raise CommandError(f"no token of {request_id} lies entirely in the text")
    start = inside[0]
    while start and not pieces[start - 1]:
        start -= 1
    return start, inside[-1] + 1


def _change(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.send(change(arguments)), patch_lines)
    return 0


def _patch(arguments: Namespace, patch: dict[str, Any]) -> Call[wire.PatchResult]:
    return calls.patch_config(
        patch,
        revision=getattr(arguments, "if_revision", None),
        validate_only=arguments.dry_run,
        confirm_within_s=arguments.confirm_within,
        guards=arguments.guards,
        guard_for_s=arguments.guard_for,
        canary_engine=arguments.canary_engine,
    )


def _tree(pairs: list[str]) -> dict[str, Any]:
    try:
        return assignments(pairs)
    except ValueError as error:
        raise UsageError(str(error)) from error
