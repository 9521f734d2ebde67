"""A console looks at the real API in front of the real core."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.console_harness import make_busy
from tests.support.core.live import LiveEngine
from tests.support.served_core import served, stepping  # noqa: F401


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """Six requests past their budget, at rest unless a test asks for `stepping`."""
    core = make_busy()
    yield core
    core.close()
