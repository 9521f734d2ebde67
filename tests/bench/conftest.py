"""Every test has a lock of its own in place of the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_machine_lock(own_machine_lock: Path) -> None:
    pass
