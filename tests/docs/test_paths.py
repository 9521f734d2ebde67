"""Every path and every function that the documents name exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
IDS = [page.name for page in PAGES]
FOLDERS = ("api", "bench", "console", "docs", "examples", "scripts", "tests", "vtoken")
PLACEHOLDER = "NAME"  # of a file that a contributor makes
OF_VLLM = {"BlockPool", "RequestOutput"}


def code_spans(page: Path) -> list[str]:
    """Inline code of the page, without fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def is_missing(path: str) -> bool:
    if PLACEHOLDER in path:
        return not (ROOT / path).parent.is_dir()
    return not (ROOT / path).exists()


@cache
def file_names() -> frozenset[str]:
    return frozenset(p.name for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


@cache
def functions() -> frozenset[str]:
    """`function`, `Class` and `Class.member` of every source file."""
    names: set[str] = set()
    for folder in ("vtoken", "api", "console"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
                if isinstance(node, ast.ClassDef):
                    names |= {f"{node.name}.{member}" for member in members(node)}
    return frozenset(names)


def members(cls: ast.ClassDef) -> set[str]:
    found = {n.name for n in cls.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_path_named_exists(page: Path) -> None:
    named = [s for s in code_spans(page) if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", s)]
    assert not [path for path in named if is_missing(path)]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_python_file_named_without_its_folder_is_somewhere(page: Path) -> None:
    named = [s.rpartition("/")[2] for s in code_spans(page) if re.fullmatch(r"[\w/]+\.py", s)]
    assert not [name for name in named if name not in file_names() and PLACEHOLDER not in name]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_method_named_exists(page: Path) -> None:
    named = [s for s in code_spans(page) if re.fullmatch(r"[A-Z]\w*[a-z]\w*\.[a-z_]\w*", s)]
    known = functions()
    gone = [s for s in named if s not in known and s.split(".")[0] not in OF_VLLM]
    assert not gone


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_anchor_of_a_link_is_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^):]*)#([^)]+)\)", page.read_text())
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert not [anchor for target, anchor in targets if anchor not in anchors(target)]


def test_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for top in ("vtoken", "vtoken/vllm", "api/vtoken_api", "console/vtoken_console"):
        rooms = [p.parent.name for p in (ROOT / top).glob("*/*.py")]
        gone = [r for r in {*rooms} if f"`{r}/`" not in text and f"`{top}/{r}/`" not in text]
        assert not gone, top
    modules = [f"vtoken/{p.name}" for p in (ROOT / "vtoken").glob("[!_]*.py")]
    assert not [module for module in modules if f"`{module}`" not in text]


def test_the_checks_can_fail() -> None:
    assert is_missing("vtoken/nothing.py")
    assert is_missing("vtoken/nothing/NAME.py")
    assert not is_missing("vtoken/policies/NAME.py")
    assert "nothing.py" not in file_names()
    assert "TokenTables.apply_moves" in functions()
    assert "TokenTable.nothing" not in functions()
    assert len(code_spans(ROOT / "CONTRIBUTING.md")) > 60
