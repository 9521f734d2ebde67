"""`python -m tests.docs`, or `make tables`: rewrite what is made from code.

These are tables of docs/, figures in prose, and the examples in the API descriptions.
"""

from __future__ import annotations

import asyncio

from tests.docs import examples, facts, figures
from tests.docs.tables import DOCS, TABLES


def said(before: str, after: str) -> str:
    return "written" if after != before else "as it was"


for table in TABLES:
    page = DOCS / table.page
    before = page.read_text()
    after = table.filled_in(before)
    page.write_text(after)
    print(f"docs/{table.page}: {table.name} {said(before, after)}")

for file in figures.PAGES:
    before = file.read_text()
    after = figures.filled_in(before)
    file.write_text(after)
    if after != before:
        print(f"{file.name}: figures written")

before, after = facts.FILE.read_text(), facts.text()
facts.FILE.write_text(after)
print(f"{facts.FILE.name}: {said(before, after)}")

before, after = examples.FILE.read_text(), asyncio.run(examples.make())
examples.FILE.write_text(after)
print(f"{examples.FILE.name}: {said(before, after)}")
