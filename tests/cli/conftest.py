"""Fixtures of the CLI tests."""

from __future__ import annotations

import pytest

from tests.support.cli_harness import Url
from tests.support.served_core import core, served, stepping  # noqa: F401
from tests.support.serving import Served


@pytest.fixture
def url(served: Served) -> Url:  # noqa: F811
    """The flag that names the server."""
    return "--url", served.url
