"""Fixtures that any test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub library is imported; no test downloads


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """Folder of the embedded demo model; made once, reused by later runs of the same recipe."""
    from vtoken.demo.model import build

    assert pytestconfig.cache is not None
    return build(pytestconfig.cache.mkdir("demo-model") / "model")
