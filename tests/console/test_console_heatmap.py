"""The heatmap, headless on a real server: zoom, filter, colours, pointer, block page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from textual import events

from tests.support.console_harness import compact, drawn, make_busy, running, screen_text, until
from tests.support.core.live import LiveEngine, make_quiet
from tests.support.core.windows import Windows
from tests.support.scripted import ScriptedEngine
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken_console.screens.block import BlockScreen
from vtoken_console.style.grid import Zoom
from vtoken_console.widgets.heatmap.cell_paint import OTHER, letter_of
from vtoken_console.widgets.heatmap.colouring import MODES, Mode


@pytest.fixture
def core() -> Iterator[LiveEngine]:
    """A pool of several blocks a cell, standing still."""
    with make_busy(5000) as core:
        yield core


async def test_zoom_goes_from_pool_over_region_and_blocks_to_slots_and_back(
    core: LiveEngine,
    served: Served,
) -> None:
    async with running(served.url) as (app, pilot):
        heatmap = app.dashboard.heatmap
        block = heatmap.cursor = core.store.tables["cmpl-a91f"][0]
        await pilot.press("z")
        await until(lambda: app.dashboard.shown == "pool", "not alone")
        for zoom, word in ((Zoom.REGION, "region ·"), (Zoom.BLOCKS, "blocks ·")):
            await pilot.press("z")
            assert heatmap.zoom is zoom
            assert heatmap.cursor == block
            await until(lambda word=word: word in screen_text(app), "no title")
            first, last = heatmap.top, heatmap.top + heatmap.content_size.height
            assert first <= heatmap.grid.row_of_block(block) < last
            assert f"of {core.store.num_blocks - 1:,}" in screen_text(app)  # the overview
        await pilot.press("enter")
        await until(lambda: isinstance(app.screen, BlockScreen), "no slots")
        await pilot.press("escape", "Z", "Z")
        assert heatmap.zoom is Zoom.POOL
        assert heatmap.cursor == block
        await pilot.press("Z")
        await until(lambda: app.dashboard.shown == "", "not all panels")


async def test_cursor_stays_on_its_line_when_the_zoom_changes(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        heatmap = app.dashboard.heatmap
        await pilot.press("2")
        await until(lambda: heatmap.grid.columns > 100, "not alone")
        heatmap.cursor = 2500
        heatmap.redraw()
        before = heatmap.grid.row_of_block(2500) - heatmap.top
        await pilot.press("z")
        assert heatmap.grid.row_of_block(2500) - heatmap.top == before


async def test_wheel_and_double_click_zoom_where_they_point(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        heatmap = app.dashboard.heatmap
        await pilot.press("2")
        await until(lambda: heatmap.grid.columns > 100, "not alone")
        place = (20, 6)  # of the widget, border included
        under = heatmap.grid.blocks_of(heatmap.grid.cell_at(19, 5))[0]
        screen = (heatmap.region.x + place[0], heatmap.region.y + place[1])
        keys = (False, False, False)
        heatmap.post_message(events.MouseScrollUp(heatmap, *place, 0, 0, 0, *keys, *screen))
        await until(lambda: heatmap.zoom is Zoom.REGION, "the wheel does not zoom")
        assert heatmap.cursor == under
        await pilot.click(heatmap, offset=place, times=2)
        await until(lambda: heatmap.zoom is Zoom.BLOCKS, "two clicks do not zoom")
        await pilot.click(heatmap, offset=place, times=2)
        await until(lambda: isinstance(app.screen, BlockScreen), "two clicks open no block")


async def test_filter_dims_what_does_not_match_and_counts_what_does(
    core: LiveEngine, served: Served
) -> None:
    held = len(core.store.tables["cmpl-a91f"])
    async with running(served.url) as (app, pilot):
        free = [strip.text.count("·") for strip in drawn(app.dashboard.heatmap)]
        await pilot.press("slash", *"req:-a91f", "enter")
        await until(lambda: app.dashboard.heatmap.matching == held, "wrong count")
        assert [strip.text.count("·") for strip in drawn(app.dashboard.heatmap)] == free
        await until(
            lambda: f"{held} of 4,999 blocks match" in screen_text(app), "count not in the title"
        )
        await until(lambda: "1 of 6 match" in screen_text(app), "requests not filtered")
        await pilot.press("escape")
        await until(lambda: app.dashboard.heatmap.matching is None, "filter not cleared")


async def test_state_filter_keeps_the_requests_that_hold_such_blocks(
    core: LiveEngine, served: Served
) -> None:
    core = make_quiet(5000, prefix_caching=True)
    for n in range(6):
        prefix = {"prefix": "system", "prefix_tokens": 16} if n < 2 else {}
        core.admit(f"cmpl-{n}", 100, **prefix)
    core.steps(2)
    async with serving(core) as served, running(served.url) as (app, pilot):
        await pilot.press("slash", *"state:shared", "enter")
        await until(lambda: app.dashboard.heatmap.matching == 1, "shared block not found")
        await until(lambda: "1 of 6 match" in screen_text(app), "its request not found")


async def test_unknown_state_is_named_and_hides_nothing(served: Served) -> None:
    async with running(served.url, size=(200, 50)) as (app, pilot):
        await pilot.press("slash", *"state:purple")
        await until(lambda: "state:purple is unknown" in screen_text(app), "not shown")
        assert app.dashboard.heatmap.matching is None


async def test_each_colour_mode_has_a_legend(served: Served) -> None:
    words = {
        Mode.UTILISATION: "dead",
        Mode.OWNER: "a request, by its letter in the table",
        Mode.STATE: "being filled",
    }
    async with running(served.url, size=(160, 40)) as (app, pilot):
        seen = []
        await pilot.press("2")
        for _ in MODES:
            mode = app.dashboard.heatmap.mode
            seen.append(mode)
            await until(lambda mode=mode: words[mode] in screen_text(app), f"{mode} has no legend")
            await pilot.press("o")
        assert tuple(seen) == MODES
        assert app.dashboard.heatmap.mode is Mode.UTILISATION


async def test_blocks_of_other_groups_are_drawn_apart_from_free_ones(core: LiveEngine) -> None:
    group = Windows(core.store, window=64)
    core.runtime.other_groups = [group]
    block = group.hold("cmpl-a91f", 40)[20]
    free = core.store.num_free_blocks()
    async with serving(core) as served, running(served.url, size=(100, 30)) as (app, pilot):
        heatmap = app.dashboard.heatmap
        await pilot.press("2")
        for mode in MODES:
            await until(lambda: "~ window" in screen_text(app), "no legend")
            assert OTHER in "".join(strip.text for strip in drawn(heatmap)[: -heatmap.foot]), mode
            await pilot.press("o")
        heatmap.cursor = block
        heatmap.redraw()
        await until(lambda: "0 of 3 used  3 window" in screen_text(app), "not named")
        await pilot.press("z", "z")
        await until(lambda: f"block {block:,}  held by a window" in screen_text(app), "not named")
        await pilot.press("slash", *"state:other", "enter")
        await until(lambda: heatmap.matching == 40, "wrong count")
        await pilot.press("slash", *"state:free", "enter")
        await until(lambda: heatmap.matching == free, "wrong count")


async def test_owner_mode_without_reported_owners_shows_an_error() -> None:
    engine = ScriptedEngine(num_blocks=60, num_requests=1)
    engine.owner = engine.owner[:0]
    async with serving(engine) as served, running(served.url) as (app, pilot):
        await pilot.press("o")
        await until(lambda: "does not report block owners" in screen_text(app), "not shown")
        assert app.dashboard.heatmap.mode_shown(app.source.feed.model) is Mode.UTILISATION


async def test_by_request_the_table_has_the_letters_of_the_map(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("o")
        for row in app.source.feed.model.requests.values():
            line = f"{letter_of(row.number)} {row.id} "
            await until(lambda line=line: line in screen_text(app), f"no {line}")
        await pilot.press("o")
        await until(lambda: line not in screen_text(app), "the letters stay")


async def test_theme_changes_at_once_and_back(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        for name in ("light", "dark"):
            await pilot.press("T")
            await until(
                lambda name=name: app.dashboard.heatmap.view.theme.name == name, "not changed"
            )
            background = app.screen.styles.background.hex.lower()
            assert background == {"light": "#ffffff", "dark": "#0d1117"}[name]


async def test_block_page_shows_the_observed_history(core: LiveEngine, served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.pause(0.3)
        block = compact(core, "cmpl-a91f").source_blocks[0]
        await app.dashboard.open_block(block)
        await until(lambda: "tokens moved out" in screen_text(app), "move not shown")
        await until(lambda: "freed by" in screen_text(app), "transition not shown")
