"""Parked tokens in the console: a third kind of token, and what brings it back."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.support.console_harness import (
    messages,
    plain_words,
    running,
    screen_text,
    until,
    words_drawn,
)
from tests.support.core.live import LiveEngine
from tests.support.documents import ROW, STATUS
from tests.support.serving import Served, serve
from tests.support.text_core import make_evicting
from vtoken import wire
from vtoken_console.changes.descriptions import irreversible
from vtoken_console.feed.connection import Connection
from vtoken_console.feed.samples import NAMES, Sampler
from vtoken_console.feed.tokens import from_pages, mostly_parked
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.appearance import choose
from vtoken_console.style.ramp import LEVELS, luminance
from vtoken_console.style.themes import DEPTHS
from vtoken_console.style.themes import NAMES as THEMES
from vtoken_console.widgets.details.text_panel import STYLES, _states
from vtoken_console.widgets.details.token_strip import _fill
from vtoken_console.widgets.figures import plot
from vtoken_console.widgets.figures.sections import pressure_section
from vtoken_console.widgets.lines import width_of
from vtoken_console.widgets.log import Second
from vtoken_console.widgets.requests import COLUMNS, floor_bar

MB = 10**6
PARKED = wire.Parking(
    capacity_bytes=800 * MB,
    used_bytes=56 * MB,
    peak_bytes=90 * MB,
    tokens=1240,
    clean_tokens=0,
    restored_tokens=360,
    waits_for="memory",
)


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """One request of 122 tokens, of which it parked those beyond its budget."""
    with make_evicting(prompt_tokens=120, budget_tokens=64, park_bytes=1 << 30) as core:
        yield core


@pytest.fixture
async def served(core: LiveEngine) -> AsyncIterator[Served]:
    async with serve(core.handle, show_text=True) as served:
        yield served


def text_of(line: Any) -> str:
    return "".join(text for text, _ in line)


# ---------------------------------------------------------------- the text


def piece(text: str, *, live: bool = False, parked: bool = False) -> wire.TextToken:
    return wire.TextToken(token_id=0, position=0, text=text, live=live, parked=parked)


@pytest.mark.parametrize(
    ("pieces", "states"),
    [
        ([piece("a", live=True), piece("b", parked=True), piece("c")], ["live", "parked", "dead"]),
        # "" only begins a character: the piece that ends it has the worst state of all.
        ([piece("", parked=True), piece("日", live=True)], ["parked", "parked"]),
        ([piece(""), piece("日", parked=True), piece("d", live=True)], ["dead", "dead", "live"]),
    ],
)
def test_a_character_of_several_tokens_has_the_state_of_the_worst(
    pieces: list[wire.TextToken], states: list[str]
) -> None:
    assert _states(pieces, [one.live for one in pieces]) == states


def test_parked_words_are_dimmed_and_not_struck() -> None:
    assert STYLES["dead"].strike
    assert not STYLES["parked"].strike
    assert STYLES["parked"].color not in (STYLES["dead"].color, palette.TEXT_STYLE.color)


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_parked_words_are_shown_and_come_back_when_they_are_asked_for(
    core: LiveEngine, served: Served, *, ascii_only: bool
) -> None:
    core.call("patch_config", patch={"shadow": None})
    core.steps()
    look = choose(depth="truecolor", ascii_only=ascii_only)
    async with running(served.url, (100, 30), appearance=look) as (app, pilot):
        await pilot.press("enter")
        await until(lambda: "parked" in screen_text(app), "no parked word")
        rows = (await app.source.rest.text("a", 0, 1024)).rows
        parked = plain_words(row.text for row in rows if row.parked)
        assert parked
        if ascii_only:
            assert f"[~{parked[0]}" in screen_text(app).replace("\n", " ")
        else:
            panel = app.screen.query_one("#text")
            ink = palette.style(palette.PARKED).color
            drawn, _ = words_drawn(panel, lambda style: style.color == ink and not style.strike)
            assert drawn == parked
        core.call("patch_config", patch={"budget_tokens": 500, "reclamation": "auto"})
        await pilot.press("R")
        question = f"Bring back {len(parked_ids(core))} of {len(parked_ids(core))} parked tokens"
        await until(lambda: question in screen_text(app), "not asked")
        await pilot.press("right", "enter")
        await until(lambda: "Restored a: " in messages(app), "not done")
        core.steps(3)
        assert not len(parked_ids(core))
        await until(lambda: "parked" not in screen_text(app).splitlines()[-3], "still parked")


def parked_ids(core: LiveEngine) -> Any:
    return core.runtime.tables["a"].parked_ids()


async def test_restore_of_a_request_that_parked_nothing_says_so(
    core: LiveEngine, served: Served
) -> None:
    core.call("patch_config", patch={"park_bytes": 0})
    core.steps()
    async with running(served.url, (100, 30)) as (app, pilot):
        assert "R restore" not in screen_text(app)
        await pilot.press("R")
        await until(lambda: "none of its tokens is parked" in screen_text(app), "no answer")


# ---------------------------------------------------------------- the strip


def view_of(name: str, depth: str, *, ascii_only: bool = False) -> View:
    look = choose(name, depth, ascii_only=ascii_only)
    return View(
        url="",
        server_name="",
        connection=Connection(),
        now=0.0,
        monotonic=0.0,
        age_s=0.0,
        ramp=look.ramp,
        theme=look.theme,
        ascii_only=ascii_only,
        read_only_requested=False,
    )


@pytest.mark.parametrize("depth", [depth for depth in DEPTHS if depth != "16"])
@pytest.mark.parametrize("name", THEMES)
def test_a_cell_of_parked_tokens_lies_between_dead_and_live_and_turns_to_live(
    name: str, depth: str
) -> None:
    view = view_of(name, depth)
    shades = [luminance(_fill(view, level, parked=True)) for level in range(LEVELS)]
    ends = luminance(view.ramp.colors[0]), luminance(view.ramp.colors[-1])
    assert min(ends) < shades[0] < max(ends)
    assert shades[-1] == ends[1]
    steps = [b - a for a, b in itertools.pairwise(shades)]
    assert all(step <= 0 for step in steps) or all(step >= 0 for step in steps)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_without_colours_a_cell_of_parked_tokens_has_a_glyph_of_its_own(
    *, ascii_only: bool
) -> None:
    view = view_of("dark", "16", ascii_only=ascii_only)
    glyph = _fill(view, 0, parked=True)
    assert glyph not in view.ramp.glyphs
    assert glyph.isascii() is ascii_only
    assert _fill(view, LEVELS - 1, parked=True) == view.ramp.glyphs[-1]


def test_a_cell_is_that_of_parked_tokens_if_half_of_its_dead_ones_are() -> None:
    rows = [
        wire.TokenRow(position=n, token_id=0, block=None, offset=None, live=live, parked=parked)
        for n, (live, parked) in enumerate(
            [(True, False)] * 3 + [(False, False)] * 2 + [(False, True)] * 4
        )
    ]
    table = from_pages([wire.TokenPage(request_id="r", start=0, total=9, step=1, rows=rows)])
    assert mostly_parked(table, 3).tolist() == [False, False, True]
    assert mostly_parked(table, 1).tolist() == [row.parked for row in rows]
    assert [table.state(n) for n in (0, 3, 5)] == ["live", "dead", "parked"]


# ---------------------------------------------------------------- figures


def given_row(**fields: Any) -> wire.RequestRow:
    values = {"live": 600, "dead": 1440, "given_tokens": 1440, "parked_tokens": 1200}
    return structs.replace(ROW, **values | fields)


@pytest.mark.parametrize(
    ("parked", "bar"), [(1440, "#" * 6 + ":" * 14), (720, "#" * 6 + ":" * 7 + "." * 7)]
)
def test_bar_of_a_request_has_the_parked_between_the_live_and_the_dead(
    parked: int, bar: str
) -> None:
    row = given_row(parked_tokens=parked, evict_when="always")
    drawn = floor_bar(row, 20, ascii_only=True)
    assert text_of(drawn) == bar
    assert width_of(drawn) == 20


def test_gave_up_has_the_parked_in_brackets_only_where_some_are() -> None:
    (column,) = (column for column in COLUMNS if column.head == "gave up")
    assert column.text is not None
    assert column.text(given_row()) == " 1440 (1200)"
    assert column.text(given_row(parked_tokens=0)) == " 1440"
    assert len(column.text(given_row(given_tokens=10**6, parked_tokens=123_456))) <= column.most


def numbers(status: wire.Status) -> dict[str, list[str]]:
    lines = map(text_of, pressure_section(status))
    return {line[:15].strip(): line[15:].split() for line in lines}


def test_numbers_have_what_is_parked_and_the_bytes_used() -> None:
    status = structs.replace(STATUS, pressure=PRESSURE, parking=PARKED)
    rows = {
        text_of(line)[:15].strip(): text_of(line)[15:].split() for line in pressure_section(status)
    }
    assert rows["parked"] == ["1,240", "need", "memory"]
    assert rows["came back"] == ["360", "tokens", "so", "far"]
    assert rows["host memory"] == ["56.0", "MB", "of", "800", "MB"]
    assert not {"gave twice", "copies dropped"} & rows.keys()
    status.parking = structs.replace(
        PARKED, swapped_requests=3, thrashed_tokens=7, dropped_tokens=9
    )
    rows = {
        text_of(line)[:15].strip(): text_of(line)[15:].split() for line in pressure_section(status)
    }
    assert rows["swapped"] == ["3", "preempted", "ones"]
    assert rows["gave twice"][0] == "7"
    assert rows["copies dropped"][0] == "9"
    status.parking = None
    assert "parked" not in "".join(map(text_of, pressure_section(status)))


PRESSURE = wire.MemoryPressure(
    near=False,
    short_blocks=0,
    growth_blocks=0,
    asked_blocks=0,
    givers=0,
    givable_tokens=0,
    givable_blocks=0,
    recent_tokens=0,
    recent_givers=0,
    window_s=10.0,
    spared_tokens=0,
)


def test_restored_tokens_are_sampled_as_a_rate_and_drawn_behind_those_that_were_given() -> None:
    status, sampler = structs.replace(STATUS, pressure=PRESSURE, parking=PARKED), Sampler()
    rates = []
    for second in range(3):
        status.ts = 1000.0 + second
        status.parking = structs.replace(PARKED, restored_tokens=50 * second)
        point = wire.Point.of(status)
        rates.append(sampler.sample(point)[NAMES.index("restored_per_s")])
    assert rates == [0.0, 50.0, 50.0]
    given, back = np.array([9.0, 9.0, 0.0, 0.0]), np.array([0.0, 0.0, 9.0, 9.0])
    top, _ = plot.plot(given, 2, 9.0, other=back)
    assert [style for _, style in top] == [
        palette.style(palette.BAR),
        palette.style(palette.PARKED),
    ]


def event(kind: str, **data: Any) -> wire.Event:
    return wire.Event(seq=1, ts=1.0, step=1, kind=kind, summary="", data=data)


def test_log_sums_what_was_parked_and_what_came_back_in_a_second() -> None:
    second = Second(1.0)
    lost = {"requests": 2, "tokens": 700, "given": 700, "parked": 600, "largest": {"a": 500}}
    second.add(event("eviction", **lost))
    assert second.text(80) == "2 requests gave up 700 tok (600 parked)"
    second.add(event("restored", requests=1, tokens=200, blocks=7, largest={}))
    assert second.text(80) == "2 requests gave up 700 tok (600 parked), 200 tok restored"
    assert second.text(50) == "2 gave 700 tok, 200 tok restored"
    second.add(event("preemption", request_id="b", swapped_tokens=90))
    second.add(event("preemption", request_id="c", swapped_tokens=0))
    assert second.text(90).endswith(", 2 preempted (1 swapped)")
    back = Second(2.0)
    for tokens in (100, 500):
        back.add(
            event("restored", requests=1, tokens=tokens, blocks=7, reason="memory", largest={})
        )
    assert back.text(80) == "600 tok restored"


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("parking", "change", "asks"),
    [
        (PARKED, {"budget_tokens": 64}, ""),
        (structs.replace(PARKED, used_bytes=790 * MB), {"budget_tokens": 64}, "Requests keep"),
        (structs.replace(PARKED, fault="refused"), {"budget_tokens": 64}, "Requests keep"),
        (PARKED, {"park_bytes": 40 * MB}, "those beyond 40.0 MB are given up"),
        (PARKED, {"park_bytes": 60 * MB}, ""),
        (None, {"budget_tokens": 64}, ""),  # nothing is parked yet
    ],
)
def test_undo_restores_what_is_parked_so_nothing_is_asked_while_there_is_room(
    parking: wire.Parking | None, change: dict[str, int], asks: str
) -> None:
    before = structs.replace(VALUES, park_bytes=800 * MB, budget_tokens=128, evict_when="always")
    reason = irreversible(before, structs.replace(before, **change), 0, [], parking)
    assert (reason or "").find(asks) >= 0
    assert bool(reason) is bool(asks)


VALUES = wire.ConfigValues(policy=wire.PolicyChoice("h2o", {}), budget_tokens=512)
