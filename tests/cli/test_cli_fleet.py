"""The commands on a server with several engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.cli_harness import run
from tests.support.core.live import LiveEngine
from tests.support.served_core import THETA_F, several
from tests.support.serving import Served
from vtoken import wire


@pytest.fixture
async def two() -> AsyncIterator[tuple[Served, list[LiveEngine]]]:
    async with several(2) as found:
        yield found


def thetas(cores: list[LiveEngine]) -> list[float]:
    return [core.runtime.config.theta_f for core in cores]


async def test_a_change_is_made_on_all_engines_or_on_the_named_one(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    (served, cores), url = two, ("--url", two[0].url)
    ran = await run("config", "set", "theta_f=0.5", *url)
    assert ran.out.splitlines()[-1] == "on engines 0, 1"
    assert thetas(cores) == [0.5, 0.5]
    ran = await run("config", "set", "theta_f=0.75", "--engine", "1", *url)
    assert "on engines" not in ran.out
    assert thetas(cores) == [0.5, 0.75]
    ran = await run("compact", "--dry-run", *url)
    assert ran.code == 0
    assert len(served.calls_of("compact")) == 1


async def test_engines_tells_who_differs_and_sync_ends_it(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    (_, cores), url = two, ("--url", two[0].url)
    ran = await run("engines", *url)
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "2 engines, all answer and run the same configuration"
    await run("config", "set", "theta_f=0.5", "--engine", "1", *url)
    ran = await run("engines", *url)
    assert ran.code == 1
    assert "differs in theta_f" in ran.out
    assert ran.out.splitlines()[-1].startswith("engine 0 runs revision 1, all others 2: theta_f")
    found = (await run("engines", "--json", *url)).json(wire.Fleet)
    assert not found.ok
    ran = await run("sync", "--dry-run", "--engine", "0", *url)
    assert "theta_f: 0.5 -> 0.25" in ran.out
    assert thetas(cores) == [THETA_F, 0.5]
    assert (await run("sync", "--engine", "0", *url)).code == 0
    assert thetas(cores) == [THETA_F, THETA_F]
    again = await run("sync", *url)
    assert again.code == 1
    assert "all engines have the same configuration" in again.err


async def test_reading_names_its_engine_and_finds_requests_anywhere(
    two: tuple[Served, list[LiveEngine]],
) -> None:
    url = ("--url", two[0].url)
    ran = await run("status", *url)
    assert ran.code == 1
    assert "several engines" in ran.err
    assert (await run("status", "--engine", "1", *url)).code == 0
    assert "r1" in (await run("requests", "--engine", "1", *url)).out
    assert (await run("request", "r1", *url)).code == 0
    missing = await run("status", "--engine", "7", *url)
    assert missing.code == 1
    assert "no engine 7" in missing.err
