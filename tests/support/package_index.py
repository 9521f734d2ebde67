"""A folder in place of the package index, for both installers that may be there."""

from __future__ import annotations

from pathlib import Path

import pytest


def only_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """pip and uv find the wheels in `folder`, and no others: no network, nothing cached."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")  # of --no-index uv reads no variable
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
