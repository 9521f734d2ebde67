"""What answers under each policy contained in the evaluation, as the package ships it in `FILE`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.tables import DOCS

FILE = Path(__file__).parents[2] / "vtoken" / "policies" / "facts.json"
KEEPS = {"half": 0.5, "a third": 0.333, "a sixth": 0.167}  # the share of the prompt kept
ASKED = ("grounds-test", "grounds-anchor-chat")  # the question is in the prompt
LATER = ("grounds-later", "grounds-anchor-later")  # it comes after the eviction
# Rows of the results: policies with parameters of today's defaults, and the full cache.
NAMES = {"full cache": "none", "keydiff": "", "keydiff anchor=seen": "keydiff"}


def _found(files: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """Policy and share kept -> share of facts found; the first of `files` that has it."""
    found: dict[tuple[str, str], float] = {}
    for file in files:
        table = json.loads((DOCS / "results" / f"{file}.json").read_text())["tables"][0]
        for name, *cells in table["rows"]:
            for column, cell in zip(table["columns"][1:], cells, strict=True):
                keep, _, what = column.partition(": ")
                if what == "found":
                    share = round(float(cell.split()[0]) / 100, 3)
                    found.setdefault((NAMES.get(name, name), keep), share)
    return found


def text() -> str:
    """The file's content: policy -> its `FactsFound`, one policy a line."""
    asked, later = _found(ASKED), _found(LATER)
    lines = []
    for policy in sorted({policy for policy, _ in asked if policy}):
        rows = [
            {"keep": share, "found": asked[policy, keep], "later": later.get((policy, keep))}
            for keep, share in KEEPS.items()
        ]
        if policy == "none":  # it keeps all
            rows = [rows[0] | {"keep": 1.0}]
        lines.append(f"{json.dumps(policy)}: {json.dumps(rows)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
