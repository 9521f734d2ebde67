"""`python -m tests.docs`, or `make tables`: rewrite the tables of docs/ that are made from code."""

from __future__ import annotations

from tests.docs.tables import DOCS, TABLES

for table in TABLES:
    page = DOCS / table.page
    before = page.read_text()
    after = table.filled_in(before)
    page.write_text(after)
    print(f"docs/{table.page}: {table.name} {'written' if after != before else 'as it was'}")
