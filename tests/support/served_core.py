"""Fixtures: a real server on loopback in front of the real core, for tests of all its clients.

A folder's conftest imports what its tests use.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.core.live import HOLES, LiveEngine, make_quiet
from tests.support.scripted import ScriptedEngine
from tests.support.serving import Served, serve


@contextlib.asynccontextmanager
async def serving(core: LiveEngine | ScriptedEngine, **options: Any) -> AsyncIterator[Served]:
    """Serve `core` with the `options` of `serve`; both are closed at the end of the block."""
    try:
        async with serve(core.handle, **options) as served:
            yield served
    finally:
        core.close()


THETA_F = 0.25  # of `several`


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """Two requests with holes, without automatic rounds."""
    with make_quiet() as core:
        core.configure(**HOLES)
        core.admit("a", 100)
        core.admit("b", 80)
        core.steps(3)
        yield core


@pytest.fixture
async def served(core: LiveEngine) -> AsyncIterator[Served]:
    async with serve(core.handle) as served:
        yield served


@pytest.fixture
async def stepping(core: LiveEngine) -> AsyncIterator[None]:
    """The engine takes steps, as it does while requests run."""
    async with core.stepping():
        yield


def with_holes(rank: int) -> LiveEngine:
    """An engine with one request, `r<rank>`, with holes."""
    core = make_quiet(epoch=f"e{rank}")
    core.configure(**HOLES, theta_f=THETA_F)
    core.admit(f"r{rank}", 100 + rank)
    core.steps(3)
    return core


@contextlib.asynccontextmanager
async def several(number: int, **options: Any) -> AsyncIterator[tuple[Served, list[LiveEngine]]]:
    """A server in front of `number` engines; engine n has one request, `r<n>`, with holes.

    `options`: those of `serve`.
    """
    cores = [with_holes(rank) for rank in range(number)]
    try:
        async with serve(*(core.handle for core in cores), **options) as served:
            yield served, cores
    finally:
        for core in cores:
            core.close()
