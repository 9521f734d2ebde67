"""No table of the documents is stale: generated ones are current, others name what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import vtoken.client
from tests.docs import facts
from tests.docs.tables import DOCS, TABLES, Table
from tests.faults.core_blocks import BLOCKS
from tests.faults.core_parking import PARKING
from tests.faults.core_tokens import TOKENS
from tests.support import models
from vtoken import wire
from vtoken.policies import describe_policies
from vtoken.policies.base import BUILT_IN
from vtoken_api.limits import DRY_RUN_TIME, RATES, READ_TIME
from vtoken_api.rest.inputs import MAX_BODY_BYTES
from vtoken_api.stream.endpoint import AUTH_TIMEOUT_S, MAX_CLIENTS, MAX_UNAUTHENTICATED
from vtoken_bench import overhead, planner
from vtoken_bench.evaluation import variants


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_generated_table_is_as_the_code_makes_it(table: Table) -> None:
    text = (DOCS / table.page).read_text()
    assert text == table.filled_in(text), "run make tables"


def test_facts_of_the_policies_are_those_of_the_results() -> None:
    assert facts.FILE.read_text() == facts.text(), "run make tables"
    found = {info.name: info.facts for info in describe_policies() if info.name in BUILT_IN}
    assert sorted(found) == sorted(name for name in found if found[name]), "one was not measured"


def test_a_stale_table_and_a_lost_marker_are_noticed() -> None:
    table = next(t for t in TABLES if t.name == "metrics")
    text = (DOCS / table.page).read_text()
    stale = text.replace("| gauge |", "| counter |", 1)
    assert stale != table.filled_in(stale) == text
    with pytest.raises(ValueError, match="0 places"):
        table.filled_in(text.replace("made by make tables", ""))


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Every table of the page: rows of cells, the head first, without the rule."""
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
        yield [[cell.strip() for cell in row] for row in rows if "---" not in row[0]]


def column(page: Path, head: str) -> list[str]:
    """The first column of the tables whose first two heads are `head`, without code marks."""
    found = [t for t in tables(page) if " | ".join(t[0][:2]).startswith(head)]
    assert found, f"{page.name} has no table {head!r}"
    return [name for table in found for row in table[1:] for name in names(row[0])]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell) or [cell]


def test_the_outcomes_and_errors_of_the_client_are_those_that_exist() -> None:
    page = DOCS / "client.md"
    assert sorted(column(page, "`outcome`")) == sorted(get_args(wire.PatchOutcome))
    exported = {name for name in vtoken.client.__all__ if name[0].isupper()}
    others = {"AsyncClient", "AsyncStream", "Client", "Server", "Stream", "VTokenError"}
    others.add("RequestText")
    assert set(column(page, "error | means")) == exported - others


def test_the_limits_are_the_servers() -> None:
    (rows,) = (t for t in tables(DOCS / "security.md") if t[1][0] == "body")
    said = dict(map(tuple, rows[1:]))
    assert said["body"].startswith(f"{MAX_BODY_BYTES // 1024} KiB")
    for what, kind in (("changes", "change"), ("reads", "read")):
        rate = RATES[kind]
        assert re.findall(r"\d+", said[what])[:2] == [f"{rate.per_second:g}", f"{rate.burst:g}"]
    rate = RATES["stream"]
    assert re.findall(r"\d+", said["streams"]) == [
        str(MAX_CLIENTS), f"{rate.per_second:g}", f"{rate.burst:g}"
    ]  # fmt: skip
    shares = [RATES[kind] for kind in (READ_TIME, DRY_RUN_TIME)]
    numbers = [f"{n:g}" for rate in shares for n in (100 * rate.per_second, rate.burst)]
    assert re.findall(r"\d+", said["the engine's thread"]) == numbers
    waiting = re.findall(r"\d+", said["streams before the token"])
    assert waiting == [str(MAX_UNAUTHENTICATED), f"{AUTH_TIMEOUT_S:g}"]


PUBLISHED = {  # names of architectures that no published model has
    "glm4_moe": "GLM-4.5",
    "granitemoe": "Granite 3",
    "hy_v3": "Hy3",
    "qwen2_moe": "Qwen2.5",
    "qwen3_moe": "Qwen3-Coder",
}


def test_every_architecture_that_is_run_is_listed() -> None:
    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text.lower())

    text = letters((DOCS / "models.md").read_text())
    kinds = {recipe.model_type.split("_v1")[0] for recipe in models.SERVED.values()}
    assert not [kind for kind in kinds if letters(PUBLISHED.get(kind, kind)) not in text]


def test_the_variants_and_situations_of_the_results_are_those_that_are_measured() -> None:
    pages = [DOCS / name for name in ("results-parts.md", "costs.md")]
    shown = [
        t for page in pages for t in tables(page) if t[0][0] in ("variant, against", "situation")
    ]
    measured = {v.name for group in overhead.GROUPS.values() for v in group}
    measured |= {s.name for s in planner.SCENARIOS}
    assert {row[0].split(", against")[0] for t in shown for row in t[1:]} <= measured
    text = "".join(page.read_text() for page in pages)
    assert not [name for name in variants.VARIANTS if name not in text]


def test_the_faults_listed_are_those_of_the_catalogue() -> None:
    text = (DOCS / "trust.md").read_text()
    part = text.partition("<!-- core faults -->")[2].partition("<!-- end -->")[0]
    listed = [line.split("|")[1].strip() for line in part.splitlines()[3:]]
    assert listed == [fault.name for fault in (*TOKENS.faults, *BLOCKS.faults, *PARKING.faults)]
