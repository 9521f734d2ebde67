"""The console on a server with several engines: it shows one, and steps through them."""

from __future__ import annotations

from tests.support.console_harness import running, screen_text, until
from tests.support.served_core import several


async def test_brackets_step_through_the_engines_and_changes_are_made_on_all() -> None:
    async with several(2) as (served, cores), running(served.url) as (app, pilot):
        await until(lambda: "engine 0 of 2" in screen_text(app), "no engine in the header")
        assert "r0" in screen_text(app)
        await pilot.press("right_square_bracket")
        await until(lambda: "engine 1 of 2" in screen_text(app), "engine 1 is not shown")
        await until(lambda: "r1" in screen_text(app), "the request of engine 1 is not shown")
        assert "r0" not in screen_text(app)
        await pilot.press("p")
        for core in cores:
            await until(lambda core=core: core.runtime.config.reclamation == "auto", "not resumed")
        await pilot.press("left_square_bracket")
        await until(lambda: "engine 0 of 2" in screen_text(app), "engine 0 is not shown again")


async def test_a_named_engine_is_read_and_changed_alone() -> None:
    async with several(2) as (served, cores), running(served.url, engine=1) as (app, pilot):
        await until(lambda: "engine 1 of 2" in screen_text(app), "no engine in the header")
        await pilot.press("p")
        await until(lambda: cores[1].runtime.config.reclamation == "auto", "not resumed")
        assert cores[0].runtime.config.reclamation == "paused"


async def test_a_server_with_one_engine_names_none() -> None:
    async with several(1) as (served, _), running(served.url) as (app, pilot):
        await until(lambda: "r0" in screen_text(app), "no request")
        await pilot.press("right_square_bracket")
        await pilot.pause()
        assert "engine 0" not in screen_text(app)
        assert app.source.feed.connection.is_live
