"""A running test server for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.fake_console.fake_server import FakeServer


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A test server with some requests already past their budget."""
    fake = FakeServer(num_blocks=400, num_requests=6)
    fake._fill()
    for _ in range(250):
        fake.tick()
    await fake.start()
    yield fake
    await fake.stop()
