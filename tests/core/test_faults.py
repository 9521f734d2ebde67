"""Every check fires: each fault of the catalogue is noticed, and by what must notice it."""

from __future__ import annotations

import pytest

from tests.faults.catalogue import Fault
from tests.faults.core import run_core_fault
from tests.faults.core_blocks import BLOCKS
from tests.faults.core_parking import PARKING
from tests.faults.core_tokens import TOKENS
from tests.faults.document import is_current

FAULTS = [*TOKENS.faults, *BLOCKS.faults, *PARKING.faults]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.inject.__name__)
def test_the_fault_is_noticed_by_its_check(fault: Fault) -> None:
    found = run_core_fault(fault)
    assert found is not None, f"nothing noticed: {fault.name}"
    assert found.by.startswith(fault.by), f"{found.by}: {found.detail}"
    assert is_current(fault, found), "run python -m tests.faults core"
