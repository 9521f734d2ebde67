"""The read-only commands: each queries the server once and prints the answer.

`--json` prints the server's documents unchanged.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import msgspec

from vtoken.cli.errors import UsageError, names_no_engine
from vtoken.cli.printing import plain, print_document, print_json, print_text
from vtoken.cli.show import config_lines, fleet_lines, policy_lines, status_lines
from vtoken.cli.show_requests import (
    audit_lines,
    block_lines,
    request_detail_lines,
    request_lines,
    token_line,
)
from vtoken.cli.usage import did_you_mean
from vtoken.client import Client, ProblemError


def status(arguments: Namespace, client: Client) -> int:
    """One engine; of a server with several, unless one is named, the table of all."""
    try:
        document = client.status()
    except ProblemError as error:
        if arguments.json or not names_no_engine(error.problem):
            raise
        code = engines(arguments, client)
        print_text("one of them in full: vtoken status --engine N")
        return code
    print_document(arguments, document, status_lines)
    return 0


def engines(arguments: Namespace, client: Client) -> int:
    """A line for each engine, then a sentence on all; 1 if they do not agree."""
    fleet = client.engines()
    print_document(arguments, fleet, fleet_lines)
    return 0 if fleet.ok else 1


def requests(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.requests(), request_lines)
    return 0


def request(arguments: Namespace, client: Client) -> int:
    """One request; with `--tokens`, one line or document for each token."""
    if not arguments.tokens:
        print_document(arguments, client.request(arguments.id), request_detail_lines)
        return 0
    for page in client.token_pages(arguments.id):
        for row in page.rows:
            print_document(arguments, row, lambda row: [token_line(row)])
    return 0


def block(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.block(arguments.id), block_lines)
    return 0


def audit(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.audit(arguments.limit), audit_lines)
    return 0


def policies(arguments: Namespace, client: Client) -> int:
    print_document(arguments, client.policies(), policy_lines)
    return 0


def config_get(arguments: Namespace, client: Client) -> int:
    """Every field with its bound; with KEY, only its effective value, as `config set` takes it."""
    document = client.config()
    if arguments.key is None:
        print_document(arguments, document, config_lines)
        return 0
    value = _value_at(msgspec.to_builtins(document.effective), arguments.key)
    if arguments.json:
        print_json(value)
    else:
        print_text(plain(value))
    return 0


def _value_at(values: dict[str, Any], key: str) -> Any:
    """The value at a dotted key; raises UsageError."""
    found: Any = values
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            known = list(found) if isinstance(found, dict) else []
            meant = did_you_mean(name, known)
            raise UsageError(f"no field {key!r}", meant or f"fields: {', '.join(known)}")
        found = found[name]
    return found
