"""The rows of faults in docs/trust.md, as `python -m tests.faults` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.catalogue import Fault, Noticed

DOCUMENT = Path(__file__).parents[2] / "docs" / "trust.md"
HEAD = "| fault | rule | what noticed it | steps later |\n|---|---|---|---|\n"


def row(fault: Fault, found: Noticed | None) -> str:
    """`steps later`: 0 for the step of the damage."""
    if found is None:
        by, after = "nothing", ""
    elif found.by.startswith("wrong"):
        is_count = found.by.startswith("wrong tokens")
        by, after = f"{found.by}: {found.detail}" if is_count else found.by, "end"
    else:
        by, after = found.by, str(found.steps)
    return f"| {fault.name} | {fault.rule} | {by} | {after} |\n"


def is_current(fault: Fault, found: Noticed | None) -> bool:
    """Whether the document has this row. The number of wrong tokens of a control may differ."""
    lines = DOCUMENT.read_text().splitlines(keepends=True)
    return _without_counts(row(fault, found)) in map(_without_counts, lines)


def _without_counts(line: str) -> str:
    return re.sub(r"(\| wrong [a-z ]+): [^|]*\|", r"\1 |", line)
