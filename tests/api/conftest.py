"""Fixtures of the API tests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.scripted import ScriptedEngine
from tests.support.served_core import core, served  # noqa: F401
from vtoken_api.log import logger


@pytest.fixture
def server_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The plugin's log, even if vLLM has disabled propagation and set a level."""
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()
