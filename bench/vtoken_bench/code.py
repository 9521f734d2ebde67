"""Which code a measurement is of: a digest for the keys of logs, a commit for people."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import vtoken
from vtoken_bench.output import commit_of, machine

PRODUCT, BENCHES = Path(vtoken.__file__).parent, Path(__file__).parent
# They describe or report what is measured, and a key has what it depends on of them. So a table
# can be corrected without hours of measuring.
REPORTING = {
    "__init__.py",
    "charts.py",
    "claims.py",
    "client_report.py",
    "comparison.py",
    "page.py",
    "progress.py",
    "log.py",
    "output.py",
    "report.py",
    "tables.py",
}
# Of the evaluation.
MEASURING = {
    "bursts.py",
    "chats.py",
    "conversations.py",
    "prose.py",
    "running.py",
    "variants.py",
}


@cache
def code_version() -> str:
    """A digest of the sources that decide a figure, and of the versions of what they call."""
    found = sha256()
    for path in sources():
        found.update(str(path.name).encode() + b"\0" + path.read_bytes() + b"\0")
    found.update(str(sorted(machine()["versions"].items())).encode())
    return found.hexdigest()[:12]


def sources() -> Iterator[Path]:
    """Every source file of vToken, and those of the benchmarks that measure."""
    yield from sorted(PRODUCT.rglob("*.py"))
    for path in sorted(BENCHES.rglob("*.py")):
        of_evaluation = path.parent.name == "evaluation"
        if path.name in REPORTING or (of_evaluation and path.name not in MEASURING):
            continue
        yield path


@cache
def commit() -> str:
    """The commit of vToken and the benchmarks, as `commit_of` has it."""
    return commit_of(PRODUCT, BENCHES)
