"""Fixtures: the console on the real API and the real core."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.console_harness import make_busy
from tests.support.core.live import LiveEngine
from tests.support.served_core import served  # noqa: F401


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """Six requests above their budget; the engine steps only with the fixture `stepping`."""
    with make_busy() as core:
        yield core


@pytest.fixture
async def stepping(core: LiveEngine) -> AsyncIterator[None]:
    """Ten steps a second, the frame rate of the screen."""
    async with core.stepping(pause_s=0.1):
        yield
