"""A console looks at the real API in front of the real core."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.console_harness import make_busy
from tests.support.core.live import LiveEngine
from tests.support.served_core import served  # noqa: F401


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """Six requests past their budget, at rest unless a test asks for `stepping`."""
    core = make_busy()
    yield core
    core.close()


@pytest.fixture
async def stepping(core: LiveEngine) -> AsyncIterator[None]:
    """Ten steps a second: as often as the screen is drawn."""
    async with core.stepping(pause_s=0.1):
        yield
