"""`vtoken record --with-text`: its file, its refusals, and its load on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli_harness import run
from tests.support.core.live import LiveEngine, make_quiet
from tests.support.serving import Served, SpelledWords, serve
from tests.support.text_recorded import lines_of, make_evicting, record, text_of
from vtoken import wire
from vtoken.cli import record_text
from vtoken.cli.record_text import TextReader
from vtoken.client import AsyncClient, Client
from vtoken.wire.reducer import StreamState
from vtoken.wire.views import View
from vtoken_api.limits import Rate, RateLimits


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    core = make_evicting()
    yield core
    core.close()


@pytest.fixture
async def served(core: LiveEngine) -> AsyncIterator[Served]:
    async with serve(core.handle, show_text=True) as served:
        yield served


def starts(served: Served, request_id: str) -> list[int]:
    return [call.start for call in served.calls_of("text") if call.request_id == request_id]


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
async def test_every_text_is_that_of_its_request_then(
    core: LiveEngine, served: Served, tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    async with core.stepping(0.05):
        ran = await record(served, file, num_calls=4)
    assert (ran.code, ran.err) == (0, "")
    assert file.stat().st_mode & 0o777 == 0o600
    header, *lines = lines_of(file)
    assert isinstance(header, wire.RecordingHeader)
    assert (header.holds_text, header.schema) == (True, wire.RECORDING_SCHEMA)
    ts, written = 0.0, {"a": 0, "b": 0}
    rows: dict[str, wire.RequestRow] = {}
    for line in lines:
        if isinstance(line, wire.Message):
            ts = line.ts
        if isinstance(line, wire.Snapshot | wire.Delta):
            changed = line.requests if isinstance(line, wire.Snapshot) else line.requests_changed
            rows |= {row.id: row for row in changed or ()}
        if isinstance(line, wire.TextLine):
            page, row = line.page, rows[line.page.request_id]
            written[page.request_id] += 1
            assert line.ts == ts
            words = SpelledWords().decode([n % 97 for n in range(len(page.rows))])
            assert text_of(page).rstrip() == words.removesuffix("\ufffd").rstrip()
            assert (page.start, page.total) == (0, len(page.rows))
            assert len(page.rows) >= row.live + row.dead - 1  # the newest may have no word yet
            assert sum(not token.live for token in page.rows) >= row.dead
    assert written["a"] > 1
    assert written["b"] > 1
    assert f"text: 2 requests, {sum(written.values())} lines; mode 0600" in ran.out
    assert "without text" not in ran.out


async def test_only_new_tokens_are_asked_for_unless_something_died(
    core: LiveEngine, served: Served, tmp_path: Path
) -> None:
    async with core.stepping(0.05):
        await record(served, tmp_path / "run.jsonl", num_calls=8)
    first, *others = starts(served, "b")
    assert first == 0
    assert all(start >= 60 for start in others)  # nothing dies in it
    assert starts(served, "a").count(0) > 1


async def test_a_request_at_rest_is_asked_for_once(served: Served) -> None:
    turns = Turns(served)
    for _ in range(4):
        await turns.turn(after_s=60.0)
    assert (starts(served, "a"), starts(served, "b")) == ([0], [0])
    turns.close()


async def test_without_the_flag_no_word_is_in_the_file_and_none_is_asked_for(
    core: LiveEngine, served: Served, tmp_path: Path
) -> None:
    plain, texts = tmp_path / "plain.jsonl", tmp_path / "texts.jsonl"
    async with core.stepping(0.05):
        assert (await run("record", str(plain), "--duration", "1", "--url", served.url)).code == 0
        assert not served.calls_of("text")
        assert (await record(served, texts, num_calls=1)).code == 0
    assert "w40" in texts.read_text()
    assert "w40" not in plain.read_text()
    assert "日" not in plain.read_text()
    header, *lines = lines_of(plain)
    assert isinstance(header, wire.RecordingHeader)
    assert (header.holds_text, header.schema) == (False, 1)
    assert not any(isinstance(line, wire.TextLine) for line in lines)


async def test_a_server_that_shows_no_text_is_refused_and_no_file_is_left(
    core: LiveEngine, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    async with serve(core.handle) as served:
        ran = await run("record", str(file), "--with-text", "--url", served.url)
        assert not served.calls_of("text")
    assert (ran.code, file.exists()) == (1, False)
    assert "shows no text" in ran.err
    assert "--vtoken-show-text" in ran.err


async def test_the_flight_recorder_never_holds_text(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    ran = await run("record", str(file), "--last", "5m", "--with-text", "--url", served.url)
    assert (ran.code, file.exists()) == (2, False)
    assert "the flight recorder never stores text" in ran.err


async def test_as_json_what_is_missing_is_counted(served: Served, tmp_path: Path) -> None:
    ran = await record(served, tmp_path / "run.jsonl", 1, "--json")
    assert ran.json(dict[str, Any])["text"] == {
        "requests": 2,
        "lines": 2,
        "unread_requests": 0,
        "failed_calls": 0,
        "skipped": [],
    }


# ---------------------------------------------------------------- load on the server


class Turns:
    """Turns of a reader with a fake clock and given request rows."""

    def __init__(self, served: Served) -> None:
        self.now = 100.0
        self.pages: list[wire.TextPage] = []
        self._served = served
        self._client = Client(served.url)
        self.reader = TextReader(self._client, self.pages.append, clock=lambda: self.now)

    async def turn(self, after_s: float = 0.0) -> int:
        """The number of calls for text."""
        self.now += after_s
        before = len(self._served.calls_of("text"))
        async with AsyncClient(self._served.url) as client:
            rows = {row.id: row for row in await client.requests()}
            config = await client.config()
        state = StreamState(view=View(requests=rows, config=config))
        await asyncio.to_thread(self.reader.turn, state)
        return len(self._served.calls_of("text")) - before

    def close(self) -> None:
        self.reader.close()
        self._client.close()


async def test_a_turn_makes_few_calls_and_is_followed_by_a_wait() -> None:
    core = make_quiet(num_blocks=200)
    for n in range(20):
        core.admit(f"r{n}", 40)
    core.steps(2)
    async with serve(core.handle, show_text=True) as served:
        turns = Turns(served)
        assert await turns.turn() == record_text.MAX_CALLS == 8
        assert await turns.turn() == 0
        assert await turns.turn(1.0) == 8
        assert await turns.turn(1.0) == 4
        assert len({page.request_id for page in turns.pages}) == 20
        assert await turns.turn(60.0) == 0  # nothing has changed
        core.steps(1)
        assert await turns.turn(1.0) == 8
        turns.close()
    core.close()


async def test_so_many_are_followed_at_once_and_the_others_are_counted(
    core: LiveEngine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_text, "MAX_REQUESTS", 1)
    turns = Turns(served)
    assert await turns.turn() == 1
    core.steps()
    assert await turns.turn(1.0) == 0  # read a second ago
    assert await turns.turn(1.5) == 1
    assert {page.request_id for page in turns.pages} == {"a"}
    core.finish("b")
    core.steps()
    await turns.turn(5.0)
    assert turns.reader.skipped() == [
        "requests without text: 1 (they, or the recording, ended before it was fetched)"
    ]
    turns.close()


async def test_a_long_request_is_read_less_often_and_a_longer_one_not_at_all(
    core: LiveEngine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_text, "PAGE_TOKENS", 60)
    monkeypatch.setattr(record_text, "MAX_TOKENS", 185)
    core.finish("b")
    turns = Turns(served)
    assert await turns.turn() == 1  # of more than three such pages
    core.steps()
    assert await turns.turn(5.0) == 0
    assert await turns.turn(1.5) == 1
    core.steps(4)
    assert await turns.turn(60.0) == 0
    assert turns.reader.skipped() == [
        "requests of more than 185 tokens: 1 (their text is incomplete or missing)"
    ]
    turns.close()


async def test_a_refused_call_is_counted_and_the_next_turn_waits(
    core: LiveEngine, served: Served
) -> None:
    turns = Turns(served)
    served.service.auth.limits = RateLimits(
        {"read": Rate(0.001, 3)}
    )  # the two of the rows, and one
    await turns.turn()
    assert len(turns.pages) == 1
    served.service.auth.limits = RateLimits({})
    assert await turns.turn(record_text.PAUSE_S - 0.5) == 0
    assert await turns.turn(1.0) > 0
    assert {page.request_id for page in turns.pages} == {"a", "b"}
    (said,) = turns.reader.skipped()
    assert said.startswith("failed calls for text: 1; the last: too many calls of this kind (read)")
    turns.close()


def test_a_text_line_is_one_document() -> None:
    line = wire.TextLine(
        ts=1.0, page=wire.TextPage(request_id="a", step=1, start=0, total=0, rows=[])
    )
    assert msgspec.json.decode(msgspec.json.encode(line), type=wire.RecordingLine) == line
