"""The source text of the grounds: paragraphs of the docstrings of Python's standard library.

No sentence is also in Python's reference, the text of other benchmarks (`vtoken_bench.texts`).
Paragraphs are plain prose: they end with a full stop, and most characters are letters.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from vtoken_bench.texts import english

MIN_CHARACTERS = 100  # of a paragraph
MIN_LETTERS = 0.75  # share of letters and spaces
OTHER_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}


def sentences(text: str) -> list[str]:
    """The sentences of `text` in lower case, white space made single."""
    parts = re.split(r"(?<=[.!?:])\s+", " ".join(text.lower().split()))
    return [part for part in parts if len(part.split()) > 3]


@cache
def docstrings() -> list[str]:
    """Paragraphs of the standard library's docstrings, in the order of module and line."""
    library = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(library.rglob("*.py")):
        if OTHER_FOLDERS.isdisjoint(path.relative_to(library).parts):
            found += _docstrings(path.read_text(encoding="utf-8", errors="replace"))
    return list(new_prose(found, [english()]))


def _docstrings(source: str) -> Iterator[str]:
    """The paragraphs of a module's docstrings, examples left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if ">>>" not in paragraph:
                    yield paragraph


def new_prose(paragraphs: Iterable[str], others: Iterable[str]) -> Iterator[str]:
    """Those of `paragraphs` that are prose, without sentences of `others` or of one before."""
    known = {sentence for text in others for sentence in sentences(text)}
    for paragraph in paragraphs:
        text = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character == " " for character in text)
        if len(text) < MIN_CHARACTERS or text[-1] != "." or letters < MIN_LETTERS * len(text):
            continue
        own = sentences(text)
        if known.isdisjoint(own):
            known.update(own)
            yield text
