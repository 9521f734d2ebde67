"""Every check fires on the real engine; with a rule switched off, the output is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.catalogue import Fault
from tests.faults.document import is_current
from tests.faults.engine import ENGINE_ARGUMENTS, EngineUnderFaults
from tests.faults.engine_faults import ENGINE
from tests.support.engines import engine_args

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def under_faults(engine: Any, demo_model: Path) -> Iterator[Any]:
    """A working engine, replaced when a fault has broken it."""
    with ExitStack() as stack:
        current: list[EngineUnderFaults] = []

        def working() -> EngineUnderFaults:
            if not current or current[-1].broken:
                stack.close()
                arguments = engine_args({}, strict=False, check_every_step=True)
                llm = stack.enter_context(engine(**ENGINE_ARGUMENTS, **arguments))
                current.append(EngineUnderFaults(llm, demo_model))
            return current[-1]

        yield working


def test_without_a_fault_nothing_is_noticed(under_faults: Any) -> None:
    nothing = Fault("nothing", "-", "-", lambda _, hit: hit())
    assert under_faults().run(nothing) is None


@pytest.mark.parametrize("fault", ENGINE.faults, ids=lambda fault: fault.inject.__name__)
def test_the_fault_is_noticed(fault: Fault, under_faults: Any) -> None:
    found = under_faults().run(fault)
    assert found is not None, f"nothing noticed: {fault.name}"
    assert found.by.startswith(fault.by), f"{found.by}: {found.detail}"
    assert is_current(fault, found), "run python -m tests.faults"


def test_the_document_lists_every_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
    assert [f.name for f in ENGINE.faults if f"| {f.name} |" not in text] == []
