"""The demo's conversations: reproducible, and never longer than requested."""

from __future__ import annotations

import random

import pytest

from vtoken.demo.conversations import (
    LONG_TOKENS,
    MIN_PASSAGE_CHARS,
    Conversation,
    excerpt,
    make_conversation,
    passages,
)


def conversations(seed: int, count: int, max_passage_chars: int = 3000) -> list[Conversation]:
    rng = random.Random(seed)
    return [make_conversation(rng, max_passage_chars) for _ in range(count)]


def test_one_seed_gives_one_sequence() -> None:
    assert conversations(1, 20) == conversations(1, 20)
    assert conversations(1, 20) != conversations(2, 20)


def test_both_kinds_come_with_several_questions() -> None:
    found = conversations(0, 100)
    assert {talk.kind for talk in found} == {"chat", "passage"}
    assert all(len(talk.questions) > 1 for talk in found)


@pytest.mark.parametrize("limit", [MIN_PASSAGE_CHARS, 2000, 3600])
def test_no_passage_is_longer_than_asked_for(limit: int) -> None:
    found = [talk.passage for talk in conversations(0, 100, limit)]
    assert 0 < max(len(passage) for passage in found) <= limit


def test_a_small_context_gets_chats_only() -> None:
    found = conversations(0, 50, MIN_PASSAGE_CHARS - 1)
    assert {talk.kind for talk in found} == {"chat"}


def test_a_long_conversation_is_about_a_passage_and_outlives_the_others() -> None:
    rng = random.Random(0)
    for _ in range(20):
        talk = make_conversation(rng, 3000, is_long=True)
        assert talk.kind == "passage"
        assert (talk.min_tokens, talk.max_tokens) == LONG_TOKENS
    others = conversations(0, 100)
    assert max(talk.max_tokens for talk in others) < LONG_TOKENS[0]
    assert not any(talk.min_tokens for talk in others)


def test_an_excerpt_is_whole_paragraphs_where_they_fit() -> None:
    assert excerpt("one\n\ntwo\n\nthree", 10) == "one\n\ntwo"
    assert excerpt("one\n\ntwo", 10) == "one\n\ntwo"
    assert excerpt("without a break", 7) == "without"


def test_there_are_many_passages_of_prose() -> None:
    found = passages()
    assert len(found) > 40
    assert len(set(found)) == len(found)
