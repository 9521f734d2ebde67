"""The source text of the grounds: paragraphs that are on every machine with the project's packages.

`licences`: the licence files of the installed packages. `docstrings`: of Python's standard library.
The calibration's own text, Python's reference, is `vtoken_bench.texts.english`.

1. No sentence is in two sources. A paragraph of a later source that shares one is left out.
2. Paragraphs are plain prose: they end with a full stop and most of their characters are letters.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from vtoken_bench.texts import english

MIN_CHARACTERS = 100  # of a paragraph
MIN_LETTERS = 0.75  # share of letters and spaces
OTHER_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
LICENCE = re.compile(r"(licen[cs]e|copying|notice)[^/]*$", re.IGNORECASE)
CODE_SUFFIXES = {".py", ".pyc", ".json", ".html"}


def sentences(text: str) -> list[str]:
    """The sentences of `text` in lower case, white space made single."""
    parts = re.split(r"(?<=[.!?:])\s+", " ".join(text.lower().split()))
    return [part for part in parts if len(part.split()) > 3]


@cache
def licences() -> list[str]:
    """Paragraphs of the installed packages' licence files, in the order of package and file."""
    found: list[str] = []
    for distribution in sorted(distributions(), key=lambda d: d.metadata["Name"].lower()):
        for file in sorted(map(str, distribution.files or [])):
            if LICENCE.search(file) and Path(file).suffix.lower() not in CODE_SUFFIXES:
                path = Path(str(distribution.locate_file(file)))
                found += _read(path).split("\n\n") if path.is_file() else []
    return list(new_prose(found, [english()]))


@cache
def docstrings() -> list[str]:
    """Paragraphs of the standard library's docstrings, in the order of module and line."""
    library = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(library.rglob("*.py")):
        if OTHER_FOLDERS.isdisjoint(path.relative_to(library).parts):
            found += _docstrings(_read(path))
    return list(new_prose(found, [english(), *licences()]))


SOURCES: dict[str, Callable[[], list[str]]] = {"licences": licences, "docstrings": docstrings}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


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
