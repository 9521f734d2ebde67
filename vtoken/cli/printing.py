"""Terminal output: unbuffered lines, aligned tables, units, colours."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from vtoken.cli.output import writing_output

T = TypeVar("T")

_COLORS = {"ok": "32", "fragmented": "33", "full": "31", "violation": "31", "dim": "2"}


def print_text(line: str) -> None:
    """Print one line to standard output and flush it; raises OutputError."""
    with writing_output():
        print(line, flush=True)


def print_json(document: Any) -> None:
    """Print a document as one line of JSON."""
    print_text(msgspec.json.encode(document).decode())


def print_document(arguments: Namespace, document: T, lines: Callable[[T], list[str]]) -> None:
    """Print `document` as JSON with `--json`, else as `lines(document)`."""
    if arguments.json:
        print_json(document)
        return
    for line in lines(document):
        print_text(line)


def coloured(text: str, meaning: str) -> str:
    """`text` in the colour of `meaning`, if standard output is a terminal with colours."""
    enabled = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if not enabled or os.environ.get("TERM") == "dumb" or meaning not in _COLORS:
        return text
    return f"\x1b[{_COLORS[meaning]}m{text}\x1b[0m"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def plain(value: Any) -> str:
    """A configuration value, as `config set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
