"""Benchmarks of tests measure nothing: they do not wait for those of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_machine_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "machine.lock"
    monkeypatch.setattr("vtoken_bench.machine_lock.lock_path", lambda: path)
    return path
