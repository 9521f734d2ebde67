"""The text of requests in a replay: that of the current position."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.console_harness import plain_words, screen_text, until, words_drawn
from tests.support.serving import serve
from tests.support.text_recorded import lines_of, make_evicting, record, text_of
from vtoken import wire
from vtoken_console.app.app import ConsoleApp
from vtoken_console.feed.replay import Replay
from vtoken_console.screens import recorded_text
from vtoken_console.screens.recorded_text import RecordedTextScreen
from vtoken_console.screens.request import RequestScreen
from vtoken_console.widgets.details.text_panel import TextPanel
from vtoken_console.widgets.requests import Requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture
async def recording(folder: Path) -> Path:
    """Created once per module."""
    path = folder / "texts.jsonl.gz"
    if not path.exists():
        core = make_evicting()
        try:
            async with serve(core.handle, show_text=True) as served, core.stepping(0.05):
                assert (await record(served, path, num_calls=8)).code == 0
        finally:
            core.close()
    return path


@contextlib.asynccontextmanager
async def shown(path: Path, moment: str = "0") -> AsyncIterator[Any]:
    app = ConsoleApp(path.name, recording=path, moment=moment, read_only=True)
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await until(lambda: app.source is not None and app.dashboard.synced, "no data")
        await until(lambda: app.source.replay.indexed and app.source.ready, "not indexed")
        yield app, pilot


async def open_page(app: ConsoleApp, pilot: Any) -> str:
    """Opens the page of the first request, and returns its id."""
    requests = app.dashboard.query_one(Requests)
    requests.focus()
    await until(lambda: requests.chosen, "no request")
    chosen = requests.chosen
    assert chosen is not None
    await pilot.press("enter")
    await until(lambda: app.screen is not app.dashboard, "not opened")
    return chosen.id


async def test_text_follows_seeks_in_both_directions(recording: Path) -> None:
    texts = [line for line in lines_of(recording) if isinstance(line, wire.TextLine)]
    async with shown(recording, moment="0") as (app, pilot):
        of = await open_page(app, pilot)
        assert isinstance(app.screen, RecordedTextScreen)
        mine = [line for line in texts if line.page.request_id == of]
        panel = app.screen.query_one(TextPanel)
        assert len(mine) > 3

        def is_shown(line: wire.TextLine) -> bool:
            dead = [row.text for row in line.page.rows if not row.live]
            struck, _ = words_drawn(panel, lambda style: style.strike)
            title = str(panel.border_title)
            return f"step {line.page.step:,}" in title and struck == plain_words(dead)

        for line in (mine[-1], mine[1], mine[-2], mine[0], mine[2]):
            app.source.seek(line.ts + 1e-4)
            await until(lambda at=line: is_shown(at), "the text of another moment")
        app.source.seek(mine[2].ts - 1e-4)
        await until(lambda: is_shown(mine[1]), "not the text before")
        assert "w1 w2" in screen_text(app)
        await pilot.press("t")
        await until(
            lambda: "Recordings hold no tokens and blocks" in screen_text(app), "nothing said"
        )
        await pilot.press("escape")
        await until(lambda: app.screen is app.dashboard, "page not closed")


async def test_page_before_the_first_text_explains_itself(recording: Path) -> None:
    texts = [line for line in lines_of(recording) if isinstance(line, wire.TextLine)]
    async with shown(recording) as (app, pilot):
        of = await open_page(app, pilot)
        first = next(line for line in texts if line.page.request_id == of)
        app.source.seek(first.ts + 1e-4)
        await until(lambda: text_of(first.page)[:5] in screen_text(app), "no text")
        app.source.index.texts[of].clear()
        await until(lambda: "holds no text of this request" in screen_text(app), "not shown")


async def test_a_text_that_takes_long_to_read_is_shown(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Replay.text

    async def slowly(self: Replay, request_id: str) -> wire.TextLine | None:
        await asyncio.sleep(3 * recorded_text.REFRESH_S)
        return await read(self, request_id)

    monkeypatch.setattr(Replay, "text", slowly)
    async with shown(recording) as (app, pilot):
        app.source.seek(app.source.index.last_ts)
        await open_page(app, pilot)
        await until(lambda: "w1 w2" in screen_text(app), "never shown")


async def test_recording_without_text_opens_the_request_page(
    tmp_path: Path, recording: Path
) -> None:
    path = tmp_path / "plain.jsonl"
    with path.open("wb") as file:
        for line in lines_of(recording):
            if isinstance(line, wire.RecordingHeader):
                line.holds_text, line.schema = False, 1
            if not isinstance(line, wire.TextLine):
                file.write(msgspec.json.encode(line) + b"\n")
    async with shown(path) as (app, pilot):
        await open_page(app, pilot)
        assert isinstance(app.screen, RequestScreen)
        expected = "not its text, tokens and blocks"
        await until(lambda: expected in screen_text(app), "not shown")


async def test_text_of_a_file_that_is_still_written_is_found(
    tmp_path: Path, recording: Path
) -> None:
    lines = lines_of(recording)
    texts = [n for n, line in enumerate(lines) if isinstance(line, wire.TextLine)]
    cut = texts[len(texts) // 2]
    path = tmp_path / "growing.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines[:cut]))
    async with shown(path) as (app, _):
        app.source.toggle_pause()
        app.source.seek(app.source.index.last_ts)
        await until(lambda: app.source.replay.at_end, "not at its present end")
        with path.open("ab") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines[cut:])
        await until(
            lambda: sum(map(len, app.source.index.texts.values())) == len(texts), "not found"
        )
