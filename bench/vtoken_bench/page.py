"""The page of all measurements, docs/results-parts.md: what docs/measurements.toml shows of them.

A subject is one file of docs/results/: its command and commit, and those of its tables and columns
that a reader needs. What is not shown stays in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vtoken_bench.output import KEPT, Result, Table, read, table_markdown

PAGE = KEPT.with_name("results-parts.md")
CONTENTS = KEPT.with_name("measurements.toml")
LAST_CODE = "899b921"  # the commit that has the code of the measurements that ended


class Shown(msgspec.Struct, frozen=True):
    """The tables whose titles begin with `title`. `columns`: those shown; none: all of them."""

    title: str = ""
    columns: tuple[str, ...] = ()


class Subject(msgspec.Struct, frozen=True):
    """A file of docs/results/. `says`: what a reader has to know; `code`: where ended code was."""

    heading: str
    file: str
    says: str = ""
    code: str = ""
    tables: tuple[Shown, ...] = (Shown(),)


class Contents(msgspec.Struct, frozen=True):
    introduction: str
    subject: tuple[Subject, ...]

    @property
    def files(self) -> list[str]:
        return [subject.file for subject in self.subject]


def contents(path: Path = CONTENTS) -> Contents:
    return msgspec.toml.decode(path.read_bytes(), type=Contents)


def page(found: Contents, results: Path) -> str:
    """The whole page, from the files in `results`. Raises FileNotFoundError if one is missing."""
    return "\n".join([found.introduction, *_sections(found, results)])


def _sections(found: Contents, results: Path) -> Iterator[str]:
    told: set[str] = set()  # notes of the tables so far
    for subject in found.subject:
        result = read(results / f"{subject.file}.json")
        yield f"## {subject.heading}\n"
        yield f"{subject.says} {_line(result, subject)}".strip() + "\n"
        for shown in subject.tables:
            for table in _chosen(result, shown):
                table.notes = [note for note in table.notes if note not in told]
                told.update(table.notes)
                yield re.sub(r" \.\. ", "..", table_markdown(table)) + "\n"


def _line(result: Result, subject: Subject) -> str:
    """Command, commits, time and sample, and where the code is that ended."""
    commits = dict.fromkeys(
        stamp.rpartition(" at ")[2] for stamp in result.measured.values() if " at " in stamp
    )
    at = ", ".join(commits) or result.commit
    repeats = f"; repeats: {result.setup['repeats']}" if result.setup.get("repeats") else ""
    measured = f"at {at}, {result.started[:10]}{repeats}."
    if subject.code:
        return f"Measured {measured} Ended; its code: {subject.code} at {LAST_CODE}."
    return f"`{result.command}` {measured}"


def _chosen(result: Result, shown: Shown) -> Iterator[Table]:
    """Raises ValueError if there is no such table or column."""
    found = [table for table in result.tables if table.title.startswith(shown.title)]
    if not found:
        raise ValueError(f"{result.bench} has no table {shown.title!r}")
    for table in found:
        columns = [0, *map(table.columns.index, shown.columns)]
        if not shown.columns:
            columns = [*range(len(table.columns))]
        hidden = [name for n, name in enumerate(table.columns) if n not in columns]
        yield Table(
            table.title,
            [table.columns[number] for number in columns],
            [[row[number] for number in columns] for row in table.rows],
            [note for note in table.notes if not _is_of(note, hidden)],
        )


def _is_of(note: str, columns: list[str]) -> bool:
    """Whether the note is of one of these columns: it begins with "NAME: "."""
    name = note.partition(":")[0]
    return any(column.startswith(name) for column in columns)
