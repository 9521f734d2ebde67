"""The guided first minute: steps wait for their condition, cover nothing, are shown once."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.console_harness import compact, running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.served_core import several
from tests.support.serving import Served
from vtoken_console.app.app import ConsoleApp
from vtoken_console.frame.guide import (
    CHANGING,
    ELSEWHERE,
    FLEET_STEP,
    LOOKING,
    Facts,
    Guide,
    seen_path,
)
from vtoken_console.screens.request import RequestScreen
from vtoken_console.screens.trial import TrialScreen
from vtoken_console.widgets.guide_panel import GuidePanel
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.requests import Requests


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def test_every_step_waits_for_its_user_and_the_last_is_remembered(
    core: LiveEngine,
    served: Served,
) -> None:
    async with running(served.url, size=(120, 40), guided=True) as (app, pilot):

        async def at(number: int) -> None:
            shown = lambda: app.guide.number == number  # noqa: E731
            await until(shown, f"step {number} does not come")

        await at(1)
        core.configure(theta_f=0.05, low_watermark_blocks=core.store.num_blocks - 1)
        compact(core, "cmpl-a91f")
        await pilot.pause(0.4)
        await at(1)  # neither time nor a relocation passes it by
        app.dashboard.query_one(Requests).focus()
        await pilot.press("down")
        await at(2)
        await pilot.press("s")
        await at(3)
        await pilot.press("enter")
        await until(lambda: isinstance(app.screen, RequestScreen), "no page")
        await at(3)
        await pilot.press("escape")
        await at(4)
        await app.dashboard.action_settings("theta_f")
        await pilot.press("left")
        await at(5)
        panel = app.screen.query_one(GuidePanel)
        await until(lambda: "to try it" in panel.render_line(0).text, "not on the page on top")
        await pilot.press("ctrl+t")
        await until(lambda: isinstance(app.screen, TrialScreen), "no terms")
        await pilot.press("enter")
        await at(6)
        assert not seen_path().exists()
        await until(lambda: app.screen is app.dashboard, "the page stays")
        await pilot.press("u")
        await until(lambda: app.guide is None, "the guide does not end")
    assert seen_path().exists()


def test_what_a_console_may_not_change_is_told_in_one_step() -> None:
    guide = Guide()
    reading = Facts(can_change=False)
    guide.update(reading)
    assert guide.shown.count == len(LOOKING) + 1
    picked = replace(reading, picked="a")
    by_kept = replace(picked, order="kept")
    for done in (picked, by_kept, replace(by_kept, page="request"), by_kept):
        assert guide.shown.text != ELSEWHERE.text
        guide.update(done)
    assert guide.shown.text == ELSEWHERE.text
    guide.update(replace(reading, page="help"))
    assert guide.finished


async def test_one_key_skips_it_and_it_covers_nothing_at_80x24(served: Served) -> None:
    async with running(served.url, size=(80, 24), guided=True) as (app, pilot):
        panel, pool = app.dashboard.query_one("#guide"), app.dashboard.query_one(Heatmap)
        await until(lambda: panel.display and panel.region.height == 4, "no guide")
        assert not panel.region.overlaps(pool.region)
        assert pool.content_size.height == 3
        assert "first minute · 1 of" in screen_text(app)
        await app.dashboard.action_settings("theta_f")
        await pilot.press("ctrl+g")
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
        await until(lambda: "first minute · 1 of 7" in screen_text(app), "no guide")
        assert "enter to open the dashboard" in screen_text(app)
        await until(lambda: app.fleet.settled, "not all engines are read")
        detail = app.fleet.page.query_one("#fleet-detail")
        assert not app.fleet.page.query_one("#guide").region.overlaps(detail.region)
        await pilot.press("enter")
        await until(lambda: app.screen is app.dashboard, "the dashboard is not opened")
        await until(lambda: "first minute · 2 of 7" in screen_text(app), "no second step")
        assert "When memory is short" in screen_text(app)


def test_every_step_fits_two_lines_of_the_smallest_terminal() -> None:
    steps = (FLEET_STEP, *LOOKING, *CHANGING, ELSEWHERE)
    shown = {step.text: re.sub("{key:([^}]*)}", "enter", step.text) for step in steps}
    assert [text for text, short in shown.items() if len(textwrap.wrap(short, 74)) > 2] == []


async def test_console_without_a_guide_shows_how_to_start_one(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        assert "first minute" not in screen_text(app)
        await pilot.press("ctrl+g")
        await until(lambda: "--guide" in screen_text(app), "not shown")
    assert not seen_path().exists()
