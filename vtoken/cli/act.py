"""The commands that change something, and `compact`; each prints the engine's answer.

`--json` prints the server's documents unchanged.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.see import config_get, policies
from vtoken.cli.show import confirm_lines, operation_lines, patch_lines
from vtoken.cli.text import print_document
from vtoken.cli.values import assignments
from vtoken.client import Client


def config(arguments: Namespace, client: Client) -> int:
    if arguments.action == "get":
        return config_get(arguments, client)
    return _patch(arguments, client, _tree(arguments.values))


def policy(arguments: Namespace, client: Client) -> int:
    if arguments.action == "list":
        return policies(arguments, client)
    choice: dict[str, Any] = {"name": arguments.name}
    if arguments.values:
        choice["params"] = _tree(arguments.values)
    return _patch(arguments, client, {"policy": choice})


def pause(arguments: Namespace, client: Client) -> int:
    return _patch(arguments, client, {"reclamation": "paused"})


def resume(arguments: Namespace, client: Client) -> int:
    return _patch(arguments, client, {"reclamation": "auto"})


def confirm(arguments: Namespace, client: Client) -> int:
    result = client.confirm(validate_only=arguments.dry_run)
    print_document(arguments, result, confirm_lines)
    return 0


def undo(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.undo(validate_only=arguments.dry_run), patch_lines)
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


def _patch(arguments: Namespace, client: Client, patch: dict[str, Any]) -> int:
    result = client.patch_config(
        patch,
        revision=getattr(arguments, "if_revision", None),
        validate_only=arguments.dry_run,
        confirm_within_s=arguments.confirm_within,
        guard_inter_token_p95_ms=arguments.guard_p95,
        guard_preemptions=arguments.guard_preemptions,
        guard_canary_agreement=arguments.guard_agreement,
        guard_canary_logprob_lost=arguments.guard_logprob_lost,
        guard_canary_count=arguments.guard_canaries,
        guard_for_s=arguments.guard_for,
    )
    print_document(arguments, result, patch_lines)
    return 0


def _tree(pairs: list[str]) -> dict[str, Any]:
    try:
        return assignments(pairs)
    except ValueError as error:
        raise UsageError(str(error)) from error
