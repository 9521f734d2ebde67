"""On 80x24 nothing important is cut off, and stale data is marked as such."""

from __future__ import annotations

import re

import pytest
from rich.style import Style

from tests.support.console_harness import make_busy, make_short, running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken import wire
from vtoken_console.frame import silence
from vtoken_console.frame.keys import KEYS
from vtoken_console.screens.request import Summary
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.lines import width_of, wrap
from vtoken_console.widgets.outcome import Outcome

SMALL = (80, 24)


def words(app) -> str:
    return " ".join(screen_text(app).split())


async def test_engine_without_a_step_is_not_shown_as_live(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "SILENT_S", 0.5)
    async with running(served.url, SMALL) as (app, _):
        served.line.hangs = True
        await until(lambda: "No step for" in screen_text(app), "a hung engine looks alive")
        expected = "while 6 requests wait for it: one very long step, or the engine hangs."
        assert expected in words(app)
        assert " silent" in screen_text(app).splitlines()[0]
        assert re.search(r"waiting  0\s+\S tok/s", screen_text(app)), "a rate of long ago"
        served.line.hangs = False
        await until(lambda: "● live" in screen_text(app).splitlines()[0], "still silent")
        assert "No step for" not in screen_text(app)


async def test_sentence_is_complete_on_eighty_columns(served: Served) -> None:
    async with running(served.url, SMALL) as (app, _):
        sentence = app.source.feed.model.status.fragmentation.sentence
        assert sentence in words(app)


async def test_empty_pool_shows_the_full_command_on_eighty_columns() -> None:
    async with serving(make_busy(400, 0)) as served, running(served.url, SMALL) as (app, _):
        await until(lambda: '"max_tokens": 512}\'' in words(app), "the command is cut")
        assert "No request is running" in words(app)
        assert f"{served.url}/v1/completions" in words(app)


def test_wrapped_line_keeps_every_word_and_marks_omitted_text() -> None:
    style = Style()
    spans = [(" one two", style), (" three; ", style), ("four five six", style)]
    lines = wrap(spans, 12, 3)
    assert [width_of(line) <= 12 for line in lines] == [True] * len(lines)
    text = " ".join("".join(part for part, _ in line).strip() for line in lines)
    assert text == "one two three; four five six"
    cut = wrap(spans, 12, 2)
    assert "".join(part for part, _ in cut[-1]).endswith("…")


async def test_help_has_every_word_on_eighty_columns_and_pages_through(served: Served) -> None:
    async with running(served.url, SMALL) as (app, pilot):
        await pilot.press("question_mark")
        seen: list[str] = []
        scroll = app.screen.query_one("#help-lines")
        await until(lambda: scroll.max_scroll_y > 0, "no lines")
        height = scroll.scrollable_content_region.height
        for top in range(0, scroll.max_scroll_y + height, height):
            at = min(top, scroll.max_scroll_y)
            await until(lambda at=at: scroll.scroll_y == at, "does not scroll by pages")
            seen += screen_text(app).splitlines()
            await pilot.press("pagedown")
        text = " ".join(" ".join(line.replace("│", " ").split()) for line in seen)
        for key in (k for k in KEYS if k.id != "fleet" and k.page != "fleet"):  # one engine
            assert " ".join(key.help.split()) in text
        assert "skip guide end the guided first minute" in text


async def test_request_page_shows_policy_and_holes_on_eighty_columns(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, SMALL) as (app, pilot):
        await app.dashboard.open_request("cmpl-a91f")
        await until(lambda: "budget 256" in words(app), "the budget is cut")
        await until(lambda: "holes" in words(app), "the line is cut")
        lines = screen_text(app).splitlines()
        assert app.screen.query_one(Summary).content_size.height == 3
        assert "floor" not in screen_text(app)
        assert "quit" in lines[-1]
        await pilot.press("c")
        await until(lambda: served.calls_of("compact"), "not sent")
        core.steps(2)
        summary = app.screen.query_one(Summary)
        await until(lambda: "Compacted request" in words(app), "no outcome shown")
        loaded = summary.step
        core.steps(1)
        await until(lambda: summary.step > loaded, "not loaded again")
        assert "Compacted request" in words(app)


async def test_settings_show_bounds_and_row_count_on_eighty_columns(served: Served) -> None:
    async with running(served.url, SMALL) as (app, _):
        await app.dashboard.action_settings("theta_f")
        await until(lambda: "reclaim when F exceeds this (0..1)" in words(app), "no bound")
        total = len(app.screen.query_one(Form).rows)
        await until(lambda: f" of {total}" in screen_text(app), "hides that there are more")


def test_text_that_does_not_fit_ends_with_an_ellipsis() -> None:
    outcome = Outcome()
    outcome.paragraphs = [("word " * 40, Style())]
    lines = outcome.build_lines(None, 40, 3)  # type: ignore[arg-type]
    assert lines[2][0][0].endswith(" …")
    assert len(lines[2][0][0]) <= 40


@pytest.mark.parametrize(("columns", "parts"), [(80, 2), (60, 1)])
async def test_a_long_sentence_has_its_sums_and_the_advice_its_key_and_no_figure_is_cut(
    columns: int, parts: int
) -> None:
    async with serving(make_short()) as served, running(served.url, (columns, 24)) as (app, _):
        status = app.source.feed.model.status
        assert len(status.fragmentation.sentence) > columns
        status.advice.append(wire.Advice(code="memory", level="note", text="not shown"))
        first = ", ".join(status.advice[0].text.split(", ")[:parts])
        await until(lambda: screen_text(app).splitlines()[2].rstrip() == f" [f] {first}", "no")
        sums = ["GIVING: 34 wait, 12 blocks missing", "77 can be given"][:parts]
        shown = re.sub(r" \(oldest [^)]*\)", "", screen_text(app).splitlines()[1])
        assert shown.strip() == f"{'; '.join(sums)}."
        assert "not shown" not in words(app)


@pytest.mark.parametrize(("text", "lines"), [("seen", 1), ("word " * 24, 2)])
async def test_messages_take_the_lines_of_one_and_move_nothing(
    served: Served, text: str, lines: int
) -> None:
    """One of two lines covers a border and one row of the map."""
    async with running(served.url, SMALL) as (app, pilot):
        panels = [part.region for part in app.screen.query("#requests, #pool, #keys")]
        for key in ("T", "o"):
            await pilot.press(key)
            await until(lambda: len(app.screen.query("Toast")) == 1, "not one message")
        app.notify(text)
        await until(lambda: [t.region.height for t in app.screen.query("Toast")] == [lines], "no")
        (toast,) = app.screen.query("Toast")
        assert [part.region for part in app.screen.query("#requests, #pool, #keys")] == panels
        assert toast.region.bottom == app.dashboard.query_one("#keys").region.y
        await pilot.press("escape")
        await until(lambda: not app.screen.query("Toast"), "not dismissed")
