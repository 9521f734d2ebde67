"""The text of a request in the console, on the real API over the real core."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.support.console_harness import plain_words, running, screen_text, until, words_drawn
from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.text_core import make_evicting
from vtoken import wire
from vtoken_console.app.app import ConsoleApp
from vtoken_console.screens import request
from vtoken_console.screens.request import RequestScreen
from vtoken_console.style import palette
from vtoken_console.style.appearance import choose
from vtoken_console.style.flow import NEWLINE, Flow, printable
from vtoken_console.style.ramp import luminance
from vtoken_console.style.themes import DEPTHS, NAMES, score_shades, theme
from vtoken_console.widgets.details.text_panel import TextPanel


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page refreshes ten times a second."""
    monkeypatch.setattr(request, "REFRESH_S", 0.1)


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    with make_evicting(prompt_tokens=120, budget_tokens=64) as core:
        yield core


@pytest.fixture
async def served(core: LiveEngine) -> AsyncIterator[Served]:
    async with serve(core.handle, show_text=True) as served:
        yield served


async def open_text(app: ConsoleApp, pilot: Any) -> TextPanel:
    """Opens the first request and waits for its text."""
    app.dashboard.query_one("#requests").focus()
    await pilot.press("enter")
    await until(lambda: isinstance(app.screen, RequestScreen), "not opened")
    panel = app.screen.query_one(TextPanel)
    await until(lambda: "tokens" in str(panel.border_title), "no text")
    await pilot.pause()
    return panel


async def rows_of(app: Any) -> list[wire.TextToken]:
    """The tokens of request "a", from the server."""
    page = await app.source.rest.text("a", 0, 1024)
    rows: list[wire.TextToken] = page.rows
    return rows


def struck(panel: TextPanel) -> list[str]:
    words, _ = words_drawn(panel, lambda style: style.strike)
    return words


async def test_enter_shows_the_text_with_the_dead_struck_and_the_protected_marked(
    core: LiveEngine, served: Served
) -> None:
    core.call("patch_config", patch={"shadow": None})
    core.steps()
    async with running(served.url) as (app, pilot):
        panel = await open_text(app, pilot)
        text = screen_text(app)
        assert "<s> w1 w2" in text
        assert " w40 日 w44" in text
        rows = await rows_of(app)
        live = core.runtime.tables["a"].live_ids().tolist()
        assert [row.token_id for row in rows if row.live] == live
        assert struck(panel) == plain_words(row.text for row in rows if not row.live)
        marked, _ = words_drawn(panel, lambda style: style.underline)
        assert marked == plain_words(row.text for row in rows[:3])
        assert "dead" in text


async def test_a_character_of_several_tokens_is_dead_with_one_of_them(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        panel = await open_text(app, pilot)
        rows = await rows_of(app)
        assert "".join(row.text for row in rows[41:44]).strip() == "日"
        shown, _ = words_drawn(panel, lambda style: style.strike, plain=False)
        assert ("日" in shown) is not all(row.live for row in rows[41:44])


async def test_cursor_follows_the_end_while_the_request_decodes(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(80, 24)) as (app, pilot):
        panel = await open_text(app, pilot)
        core.steps(12)
        await until(lambda: panel.cursor == 133, "does not follow")
        assert panel.has_focus
        assert "follows" in str(panel.border_subtitle)
        assert len(served.calls_of("text")) > 1
        await pilot.press("home")
        await until(lambda: panel.cursor == 0, "not moved")
        core.steps()
        await until(lambda: "135 tokens" in str(panel.border_title), "no new token")
        assert (panel.cursor, panel.follows) == (0, False)
        await pilot.press("end")
        await until(lambda: panel.follows and panel.cursor == 134, "does not follow again")


async def test_only_new_tokens_are_requested_until_an_eviction(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        panel = await open_text(app, pilot)
        dead = core.runtime.tables["a"].num_dead
        core.steps(4)
        await until(lambda: "126 tokens" in str(panel.border_title), "no new tokens")
        assert core.runtime.tables["a"].num_dead == dead
        starts = [call.start for call in served.calls_of("text")]
        assert starts[0] == 0
        assert all(start >= 122 for start in starts[1:])
        while core.runtime.tables["a"].num_dead == dead:
            core.steps()
        await until(lambda: [c.start for c in served.calls_of("text")].count(0) == 2, "not again")
        dead = plain_words(row.text for row in await rows_of(app) if not row.live)
        await until(lambda: struck(panel) == dead, "old flags")


async def test_shadow_is_shown_side_by_side_with_differences_marked(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(80, 24)) as (app, pilot):
        panel = await open_text(app, pilot)
        assert "shadow streaming_llm" in screen_text(app)
        await pilot.press("home", *["right"] * 3)
        await until(lambda: panel.cursor == 3, "not moved")
        assert "the shadow evicts it" in screen_text(app)  # the oldest but the sinks
        rows = (await rows_of(app))[4:]  # the cursor is on the fourth
        marks = [palette.WARN_STYLE.color, palette.GOOD_STYLE.color]
        struck_words = words_drawn(panel, lambda style: style.strike)
        different = words_drawn(panel, lambda style: style.color in marks)
        pairs = [(row, row.live if row.shadow_live is None else row.shadow_live) for row in rows]
        assert struck_words == (
            plain_words(row.text for row in rows if not row.live),
            plain_words(row.text for row, kept in pairs if not kept),
        )
        expected = plain_words(row.text for row, kept in pairs if kept != row.live)
        assert expected
        assert different == (expected, expected)


async def test_t_goes_to_the_tokens_and_back_with_one_cursor(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        panel = await open_text(app, pilot)
        await pilot.press("home", *["right"] * 5, "t")
        await until(lambda: not panel.display, "still the text")
        strip = app.screen.query_one("#strip")
        await until(lambda: strip.cursor == 5 and strip.has_focus, "another cursor")
        assert "t text" in screen_text(app)
        await pilot.press("right", "t")
        await until(lambda: panel.cursor == 6 and panel.has_focus, "another cursor")
        assert "t tokens" in screen_text(app)


async def test_refused_text_is_shown_with_the_remedy(core: LiveEngine) -> None:
    async with serve(core.handle) as served, running(served.url) as (app, pilot):
        app.dashboard.query_one("#requests").focus()
        await pilot.press("enter")
        await until(lambda: app.screen.query_one("#strip").table is not None, "no tokens")
        await pilot.press("t")
        await until(lambda: "--vtoken-show-text" in screen_text(app), "not shown")
        assert "this server does not show the text of requests" in screen_text(app)
        refused = served.service.auth.refusals.counts[403]
        core.steps()
        strip = app.screen.query_one("#strip")
        await until(lambda: len(strip.table) == 123, "no refresh")
        assert served.service.auth.refusals.counts[403] == refused == 1


async def test_without_colour_dead_tokens_are_in_brackets_and_text_is_ascii(
    core: LiveEngine, served: Served
) -> None:
    appearance = choose(depth="truecolor", ascii_only=True)
    async with running(served.url, appearance=appearance) as (
        app,
        pilot,
    ):
        await open_text(app, pilot)
        text = screen_text(app)
        assert text.isascii()
        first = next(row.token_id for row in await rows_of(app) if not row.live)
        assert "{<s> w1 w2}" in text
        assert f" [-w{first}" in text
        assert "[-dead-]  {protected}" in text


# ---------------------------------------------------------------- layout


@given(st.lists(st.text(st.sampled_from("ab日 \n"), max_size=9), max_size=30), st.integers(2, 12))
def test_a_flow_keeps_every_letter_in_order_and_within_its_width(
    texts: Sequence[str], width: int
) -> None:
    flow = Flow(width)
    for text in texts:
        flow.add(text)
    assert all(cell_len("".join(part for _, part in line)) <= width for line in flow.lines)
    pieces = [piece for line in flow.lines for piece in line]
    for token, text in enumerate(texts):
        shown = "".join(part for other, part in pieces if other == token)
        assert shown.replace(" ", "").replace(NEWLINE, "") == "".join(text.split())
    tokens = [token for token, _ in pieces]
    assert tokens == sorted(tokens)
    for token, group in itertools.groupby(
        [(token, y) for y, line in enumerate(flow.lines) for token, _ in line], lambda at: at[0]
    ):
        assert flow.line_of[token] == next(group)[1]


def test_words_of_several_tokens_are_not_broken() -> None:
    flow = Flow(10)
    for text in ("The", " quick", " br", "own", " fox"):
        flow.add(text)
    assert ["".join(part for _, part in line) for line in flow.lines] == ["The quick ", "brown fox"]
    assert flow.line_of == [0, 0, 0, 1, 1]


def test_characters_that_a_terminal_interprets_are_removed() -> None:
    assert (
        printable("a\x1b[31m\r\n\tb\u202e\u200dc\x7f\u00a0\x85") == "a␛[31m␍\n    bc\ufffd \ufffd"
    )


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", NAMES)
def test_text_is_readable_on_every_shade_and_shades_are_in_order(name: str, depth: str) -> None:
    current = theme(name, depth)
    shades = score_shades(current)
    assert bool(shades) is (depth != "16")
    ink = luminance(current.color(palette.TEXT))
    for shade in shades:
        low, high = sorted((luminance(shade), ink))
        assert (high + 0.05) / (low + 0.05) >= 4.5, shade
    levels = [luminance(shade) for shade in shades]
    assert levels == sorted(levels, reverse=name == "light")
    assert len(set(shades)) == len(shades)
