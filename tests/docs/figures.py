"""Figures in the prose of documents: each is marked with the name of what was measured.

`1.50<!--=curve-45-pressure--> times` shows the figure `curve-45-pressure`, which
docs/figures.toml finds in a file of docs/results/. `?` in place of the number is filled in by
`make tables`, which also corrects a number that the file no longer has.

A figure is a claim, a cell of a table, or any value by its path:

    saturated = {in = "evaluation-pressure", claim = "Saturated: ...", model = "trained"}
    facts-full = {in = "grounds-test", table = "The qu", row = "full cache", column = "half: found"}
    served = {in = "gpu", path = "claims.3.value"}

Of a claim, `end` is "low" or "high" of its 95% interval. `table` is how a title begins, `row` is
the first cell of a row, and `number` counts the numbers in the cell. `as` is a
format of Python, as "+.0f" or ".1%"; without it a claim in "x" has two digits behind the point, one
in "%" none, and a cell is as it is written.

A number in prose is a measurement if it has a unit of `UNITS`, is one of "3 of 4" or of an interval
"3 .. 4", or is all of a table's cell. On the pages in `COVERED` it needs a marker. Exempt are code,
the head of a table, and the phrases in `conditions` of docs/figures.toml, which say how something
was measured or configured.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from vtoken_bench.output import Result, Table, read, shown_cell

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "docs" / "figures.toml"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COVERED = (
    "README.md",
    "docs/choose.md",
    "docs/costs.md",
    "docs/pressure.md",
    "docs/quality.md",
    "docs/results.md",
)
UNITS = ("x", "times", "points?", "tokens a second", "requests a second", "ms", "µs")
SHOWN = r"[-+]?\d[\d,]*(?:\.\d+)?"
MARKED = re.compile(rf"(?:{SHOWN}|\?)<!--=([a-z0-9-]+)-->")
MEASURED = re.compile(
    rf"(?<![\w.,]){SHOWN}(?= ?%| (?:{'|'.join(UNITS)})\b|x\b| of \d| \.\. )"
    rf"|(?<= \.\. ){SHOWN}|(?<=\| ){SHOWN}(?= \|)"
)
NOT_PROSE = re.compile(
    r"^```.*?^```$|`[^`\n]+`"
    r"|<!-- table: .*?<!-- end of table -->|\]\([^)]*\)|^\|[^\n]*\n(?=\|---)",
    re.DOTALL | re.MULTILINE,
)
FORMATS = {"x": ".2f", "%": ".0f"}  # of a claim, by its unit


@cache
def sources() -> dict[str, Any]:
    return tomllib.loads(SOURCES.read_text())


def filled_in(text: str) -> str:
    """`text` with every marked figure as its file has it. Raises KeyError for an unknown one."""
    return MARKED.sub(lambda match: f"{shown(match[1])}<!--={match[1]}-->", text)


def names(text: str) -> list[str]:
    """The figures that `text` shows."""
    return MARKED.findall(text)


def unmarked(text: str) -> list[str]:
    """Measurements in the prose of `text` without a marker, each with the words around it."""
    prose = NOT_PROSE.sub("", text)
    for phrase in sources()["conditions"]:
        prose = re.sub(phrase, "", prose)
    prose = MARKED.sub("", prose)
    return [prose[max(0, m.start() - 30) : m.end() + 30] for m in MEASURED.finditer(prose)]


@cache
def shown(name: str) -> str:
    """The figure `name` as a page shows it."""
    source = sources()["figures"][name]
    result = _result(source["in"])
    if "claim" in source:
        return _claim(result, source)
    if "path" in source:
        value: Any = msgspec.to_builtins(result)
        for key in source["path"].split("."):
            value = value[int(key) if isinstance(value, list) else key]
        return _formatted(value, source.get("as", ""))
    return _cell(result, source)


@cache
def _result(name: str) -> Result:
    return read(ROOT / "docs" / "results" / f"{name}.json")


def _claim(result: Result, source: dict[str, Any]) -> str:
    (claim,) = [
        c
        for c in result.claims
        if c.what == source["claim"] and source.get("model", c.model) == c.model
    ]
    value = claim.value
    if "end" in source:
        assert claim.interval is not None, source
        value = claim.interval[("low", "high").index(source["end"])]
    return _formatted(value, source.get("as", FORMATS.get(claim.unit, ".3g")))


def _cell(result: Result, source: dict[str, Any]) -> str:
    cells = [
        row[table.columns.index(source["column"])]
        for table in _tables(result, source["table"])
        if source["column"] in table.columns
        for row in table.rows
        if source["row"] == row[0]
    ]
    (cell,) = cells
    if not isinstance(cell, str):
        return _formatted(cell, source["as"]) if "as" in source else shown_cell(cell)
    number = re.findall(SHOWN, cell)[source.get("number", 1) - 1]
    return _formatted(float(number.replace(",", "")), source["as"]) if "as" in source else number


def _tables(result: Result, title: str) -> list[Table]:
    """Those of that title, else those whose title begins so."""
    exact = [table for table in result.tables if table.title == title]
    return exact or [table for table in result.tables if table.title.startswith(title)]


def _formatted(value: Any, spec: str) -> str:
    return format(value, spec).removesuffix("%")
