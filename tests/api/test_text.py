"""The text of a request: its contents, access to it, and that it leaks nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.served_core import serving
from tests.support.serving import SpelledWords
from tests.support.text_core import make_evicting
from vtoken import wire
from vtoken.client import AsyncClient, ProblemError
from vtoken_api.text import MAX_HELD_TOKENS, pieces

CONTROL, READ = "control-token-0123456789", "read-token-0123456789"


class Letters:
    """A tokenizer with one byte per token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode(errors="replace")


async def refused(client: AsyncClient, request_id: str = "a") -> wire.Problem:
    with pytest.raises(ProblemError) as caught:
        await client.text(request_id)
    return caught.value.problem


async def test_the_pieces_are_the_text_and_the_flags_are_the_table() -> None:
    core = make_evicting()
    async with serving(core, show_text=True) as served, AsyncClient(served.url) as client:
        page = await client.text("a", 0, 4096)
    assert (page.total, page.prompt_tokens, len(page.rows)) == (203, 201, 203)
    words = [n % 97 for n in range(203)]
    assert "".join(row.text or "" for row in page.rows) == SpelledWords().decode(words)
    assert [row.text for row in page.rows[40:45]] == [" w40", "", "", " 日", " w44"]
    tokens = core.reporter.tokens("a", 0, 4096).rows
    assert [row.live for row in page.rows] == [row.live for row in tokens]
    assert [row.position for row in page.rows] == [row.position for row in tokens]
    assert [row.token_id for row in page.rows if row.protected] == [0, 1, 2]
    assert not all(row.live for row in page.rows)


@pytest.mark.parametrize("limit", [1, 7, 64])
async def test_pages_of_any_size_are_the_same_text(limit: int) -> None:
    core = make_evicting()
    async with serving(core, show_text=True) as served, AsyncClient(served.url) as client:
        whole = await client.text("a", 0, 4096)
        rows, start = [], 0
        while start < whole.total:
            page = await client.text("a", start, limit)
            assert (page.start, page.total, len(page.rows)) == (
                start,
                whole.total,
                min(limit, whole.total - start),
            )
            rows += page.rows
            start += limit
        beyond = await client.text("a", whole.total, limit)
    assert rows == whole.rows
    assert beyond.rows == []


async def test_without_the_flag_nobody_reads_text_and_the_engine_is_not_asked() -> None:
    async with serving(make_evicting()) as served, AsyncClient(served.url) as client:
        problem = await refused(client)
    assert (problem.status, problem.title) == (403, "Text is not shown")
    assert problem.bound == "a server started with --vtoken-show-text"
    assert not served.calls_of("text")
    assert served.service.auth.refusals.counts[403] == 1


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/requests/nobody/text", 404, "request_id"),
        ("/requests/a/text?limit=0", 422, "limit"),
        ("/requests/a/text?limit=4097", 422, "limit"),
        ("/requests/a/text?start=-1", 422, "start"),
        ("/requests/a/text?words=1", 422, "words"),
    ],
)
async def test_a_bad_call_names_what_is_wrong(path: str, status: int, field: str) -> None:
    async with (
        serving(make_evicting(), show_text=True) as served,
        httpx.AsyncClient(base_url=served.url + "/vtoken/v1") as http,
    ):
        answer = await http.get(path)
    problem = msgspec.json.decode(answer.content, type=wire.Problem)
    assert (answer.status_code, problem.status, problem.field) == (status, status, field)


async def test_a_server_without_a_tokenizer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(make_evicting(), show_text=True) as served:

        def get_tokenizer() -> None:
            raise ValueError("Tokenizer not available when `skip_tokenizer_init=True`")

        monkeypatch.setattr(served.client, "get_tokenizer", get_tokenizer)
        async with AsyncClient(served.url) as client:
            problem = await refused(client)
    assert (problem.status, problem.title) == (409, "No text")
    assert "skip_tokenizer_init" in problem.detail


async def test_text_is_neither_stored_by_caches_nor_logged_nor_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        serving(make_evicting(), show_text=True, state_dir=str(tmp_path)) as served,
        httpx.AsyncClient(base_url=served.url + "/vtoken/v1") as http,
    ):
        answer = await http.get("/requests/a/text?limit=4096")
        assert "w40" in answer.text
        assert answer.headers["Cache-Control"] == "no-store"
        await http.post("/compactions", json={"request_id": "a"})
        audit = (await http.get("/audit")).text
        recording = (await http.get("/recording")).text
    assert "compact" in audit
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"compact" in stored
    for kept in (audit, recording, stored.decode(errors="replace"), caplog.text):
        assert "w40" not in kept
        assert "日" not in kept


# ---------------------------------------------------------------- decoding


@given(st.text(max_size=40), st.integers(0, 40))
def test_pieces_join_to_the_text_whatever_a_token_is_part_of(text: str, cut: int) -> None:
    """One byte a token: every character beyond ASCII is of several. A piece that has been given
    stays when more tokens come."""
    words = list(text.replace("\ufffd", "").encode())
    found = pieces(Letters(), words)
    assert "".join(piece or "" for piece in found) == text.replace("\ufffd", "")
    assert pieces(Letters(), words[:cut]) == found[:cut]


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_hold_back_what_follows_for_some_tokens_only(
    words: list[int],
) -> None:
    ended = [*words, *b"x" * (MAX_HELD_TOKENS + 1)]
    assert (pieces(Letters(), ended)[-1] or "").endswith("x")


def test_a_place_without_a_word_has_no_text_and_the_text_goes_on_behind_it() -> None:
    words = [*b"ab", wire.NO_TOKEN_ID, wire.NO_TOKEN_ID, *"é!".encode()]
    assert pieces(Letters(), words) == ["a", "b", None, None, "", "é", "!"]
