"""The printer of all commands: documents on standard output, as JSON or as lines and tables.

1. a document is a struct of the wire. `--json` prints it as one line; else a function of `show`
   makes the parts of its text
2. a part is a line or a Table; a text may be coloured, with `coloured`
3. every line is flushed. Colours and bold heads are for terminals that want them (NO_COLOR, TERM).
   Lines and the last column of a table are wrapped to the width of a terminal, and never in a
   pipe. No text is cut off
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

T = TypeVar("T")

COLOURS = {"ok": "green", "fragmented": "yellow", "full": "red", "violation": "red"}
MIN_COLUMNS = 20  # of a last column that is wrapped
PIPE_COLUMNS = 1_000_000


class OutputError(Exception):
    """Standard output cannot be written: a full disk, for instance. A closed pipe is none."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one length, in aligned columns; `head`: what the columns are."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


Part = str | Table


def facts(*rows: tuple[str, str]) -> Table:
    """A row for each name with a text; those without one are left out."""
    return Table([row for row in rows if row[1]])


def coloured(text: str, meaning: str) -> str:
    """`text` in the colour of `meaning`, if it has one."""
    colour = COLOURS.get(meaning)
    return text if colour is None else click.style(text, fg=colour)


def plain(value: Any) -> str:
    """A configuration value, as `config set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


class Printer:
    """`as_json`: documents as JSON, and of text nothing."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def show(self, document: T, parts: Callable[[T], Iterable[Part]]) -> None:
        """Print `document`: as JSON, or its parts. Raises OutputError."""
        if self.as_json:
            import msgspec  # here, so that `--help` does not load it

            self.line(msgspec.json.encode(document).decode())
            return
        for part in parts(document):
            self.part(part)

    def part(self, part: Part) -> None:
        """Print a line or a table of text. Raises OutputError."""
        for line in self.rendered(part):
            self.line(line)

    def line(self, line: str) -> None:
        """Print one line as it is. Raises OutputError."""
        with writing_output():
            print(line, flush=True)

    def rendered(self, part: Part) -> list[str]:
        """The lines of `part` as standard output shows them."""
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text

        text = io.StringIO()
        console = Console(
            file=text,
            force_terminal=sys.stdout.isatty(),
            color_system=None if os.environ.get("NO_COLOR") else "auto",
        )
        if isinstance(part, str):
            console.print(Text.from_ansi(part), soft_wrap=not console.is_terminal)
        elif part.rows:
            rows = [*([part.head] if part.head else []), *part.rows]
            *fixed, _last = zip(*rows, strict=True)
            left = console.width - sum(max(map(cell_len, map(click.unstyle, c))) + 2 for c in fixed)
            if not console.is_terminal or left < MIN_COLUMNS:  # the terminal breaks lines itself
                console.width = PIPE_COLUMNS
            grid = Grid.grid(padding=(0, 2, 0, 0))
            for _ in fixed:
                grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            for row in rows:
                style = "bold" if row is part.head else ""
                grid.add_row(*map(Text.from_ansi, row), style=style)
            console.print(grid)
        return [line.rstrip() for line in text.getvalue().splitlines()]


@contextmanager
def writing_output() -> Iterator[None]:
    """Raise OutputError where a write to standard output fails."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror}") from error
