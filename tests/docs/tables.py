"""The tables of docs/ that are made from code.

Each is between `<!-- table: NAME, made by make tables -->` and `<!-- end of table -->`. The tables
of faults (`python -m tests.faults`) and of benchmarks (`vtoken bench results`) need engines and
have markers and commands of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vtoken.policies import describe_policies, make_policy
from vtoken.policies.base import BUILT_IN
from vtoken_api.metrics import METRICS
from vtoken_console.frame.keys import KEYS, MOVES

DOCS = Path(__file__).parents[2] / "docs"
Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`rows()` of cells under `columns`, on one page of docs/."""

    name: str
    page: str
    columns: Cells
    rows: Callable[[], Iterable[Cells]]

    def markdown(self) -> str:
        head, *rows = (_line(cells) for cells in (self.columns, *self.rows()))
        return "".join([head, "|---" * len(self.columns) + "|\n", *rows])

    def filled_in(self, text: str) -> str:
        """`text` with this table between its markers."""
        begin, end = f"<!-- table: {self.name}, made by make tables -->\n", "<!-- end of table -->"
        pattern = f"({re.escape(begin)}).*?({re.escape(end)})"
        found, number = re.subn(
            pattern, lambda m: f"{m[1]}{self.markdown()}{m[2]}", text, flags=re.DOTALL
        )
        if number != 1:
            raise ValueError(f"docs/{self.page} has {number} places for the table {self.name!r}")
        return found


def _line(cells: Cells) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _metrics() -> Iterator[Cells]:
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in metric.labels)
        yield f"`{metric.full_name}`", metric.kind, labels, metric.help


def _policies() -> Iterator[Cells]:
    """Those without scores first; of other packages none, whatever is installed here."""
    made = [make_policy(name, {}) for name in BUILT_IN]
    for policy in sorted(made, key=lambda p: (p.reads is not None, p.name != "none", p.name)):
        reads = "" if policy.reads is None else f"`{policy.reads.kind}`"
        if "token_ids" in policy.needs:
            reads += ", kinds of tokens"
        source = "" if policy.source == "-" else policy.source
        yield f"`{policy.name}`", policy.summary, reads, source


def _parameters() -> Iterator[Cells]:
    """Of the built-in policies, as `vtoken policy list` has them."""
    for policy in describe_policies():
        if policy.name not in BUILT_IN:
            continue
        for name, field in policy.params_schema["properties"].items():
            bound = (
                "" if "minimum" not in field else f"{field['minimum']:g} to {field['maximum']:g}"
            )
            default = str(field["default"]).lower()
            yield f"`{policy.name}`", f"`{name}`", default, bound, field["description"]


def _keys() -> Iterator[Cells]:
    for key in KEYS:
        changes = "yes" if key.control else ""
        yield f"`{key.shown}`", key.group, key.help, f"`{key.id}`", changes
    for keys, what in MOVES:
        yield keys, "Move", what, "", ""


TABLES = (
    Table("metrics", "metrics.md", ("name", "type", "labels", "meaning"), _metrics),
    Table("policies", "policies.md", ("policy", "what it does", "reads", "source"), _policies),
    Table(
        "parameters",
        "policies.md",
        ("policy", "parameter", "default", "bounds", "meaning"),
        _parameters,
    ),
    Table("keys", "console.md", ("key", "group", "does", "name", "changes the server"), _keys),
)
