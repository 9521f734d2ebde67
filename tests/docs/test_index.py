"""Every page begins in short, and the index leads to every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_at_most_three_sentences_in_short(page: Path) -> None:
    title, short, *_ = page.read_text().split("\n\n")
    assert title.startswith("# ")
    assert short.startswith("**In short:** ")
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", short)
    assert 1 <= len(re.findall(r"\.(?=\s|$)", text)) <= 3


def test_the_index_leads_to_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "README.md").read_text()))
    assert {page.name for page in PAGES} - named == {"README.md"}
