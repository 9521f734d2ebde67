"""Both clients in front of the real core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.client_harness import Either
from tests.support.served_core import core, served, stepping  # noqa: F401
from tests.support.serving import Served
from vtoken.client import AsyncClient, Client, Server


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def either(kind: Any, served: Served) -> AsyncIterator[Either]:  # noqa: F811
    async with Either(kind, Server(served.url, actor="ana")) as either:
        yield either
