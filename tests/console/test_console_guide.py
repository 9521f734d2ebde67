"""The guided first minute: steps wait for their condition, cover nothing, are shown once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.console_harness import compact, running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.served_core import several
from tests.support.serving import Served
from vtoken_console.app.app import ConsoleApp
from vtoken_console.frame.guide import FLEET_STEP, STEPS, seen_path
from vtoken_console.widgets.guide_panel import GuidePanel
from vtoken_console.widgets.heatmap.heatmap import Heatmap


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def test_every_step_waits_for_its_action_and_the_last_is_remembered(
    core: LiveEngine,
    served: Served,
) -> None:
    core.configure(theta_f=0.9)  # holes may grow, no round runs
    async with running(served.url, size=(120, 40), guided=True) as (app, pilot):

        async def at(number: int) -> None:
            shown = lambda: app.guide.number == number  # noqa: E731
            await until(shown, f"step {number} does not come")

        await at(1)
        await pilot.pause(0.4)
        await at(1)  # no time passes it by
        await pilot.press("right")
        await at(2)
        core.call("patch_config", actor="ana", patch={"theta_f": 0.05})
        await at(3)
        await pilot.press("t")
        await at(4)
        await pilot.press("left")
        await at(5)
        panel = app.screen.query_one(GuidePanel)
        await until(lambda: "Press enter" in panel.render_line(0).text, "not on the page on top")
        await pilot.press("enter")
        await at(6)
        await pilot.press("escape")
        compact(core, "cmpl-a91f")
        await at(7)
        await pilot.press("u")
        await at(8)
        await pilot.press("t", "left", "ctrl+t", "enter")
        await at(9)
        await pilot.press("escape", "y")
        await at(10)
        assert not seen_path().exists()
        await pilot.press("question_mark")
        await until(lambda: app.guide is None, "the guide does not end")
    assert seen_path().exists()


async def test_one_key_skips_it_and_it_covers_nothing_at_80x24(served: Served) -> None:
    async with running(served.url, size=(80, 24), guided=True) as (app, pilot):
        panel, pool = app.dashboard.query_one("#guide"), app.dashboard.query_one(Heatmap)
        await until(lambda: panel.display and panel.region.height == 4, "no guide")
        assert not panel.region.overlaps(pool.region)
        assert pool.region.height >= 6
        assert "first minute · 1 of" in screen_text(app)
        await pilot.press("t", "ctrl+g")
        await until(lambda: app.guide is None, "not skipped from a page")
        await until(lambda: not panel.display, "the panel stays")
    assert seen_path().exists()


async def test_with_several_engines_it_begins_on_the_fleet_page() -> None:
    async with (
        several(2) as (served, _),
        ConsoleApp(served.url, guided=True).run_test(size=(80, 24)) as pilot,
    ):
        app: Any = pilot.app
        await until(lambda: app.fleet.is_shown, "no fleet page")
        await until(lambda: "first minute · 1 of 11" in screen_text(app), "no guide")
        assert "enter to open the dashboard" in screen_text(app)
        await until(lambda: app.fleet.settled, "not all engines are read")
        detail = app.fleet.page.query_one("#fleet-detail")
        assert not app.fleet.page.query_one("#guide").region.overlaps(detail.region)
        await pilot.press("enter")
        await until(lambda: app.screen is app.dashboard, "the dashboard is not opened")
        await until(lambda: "first minute · 2 of 11" in screen_text(app), "no second step")
        assert "Move the cursor" in screen_text(app)


def test_every_step_fits_two_lines_of_the_smallest_terminal() -> None:
    import textwrap

    assert [s.text for s in (FLEET_STEP, *STEPS) if len(textwrap.wrap(s.text, 74)) > 2] == []


async def test_console_without_a_guide_shows_how_to_start_one(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        assert "first minute" not in screen_text(app)
        await pilot.press("ctrl+g")
        await until(lambda: "--guide" in screen_text(app), "not shown")
    assert not seen_path().exists()
