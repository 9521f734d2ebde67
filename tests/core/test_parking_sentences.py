"""What is said about parked tokens: in the sentence, of a request, and of the whole server."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from tests.support.documents import ROW, STATUS
from vtoken.sentences.parking import back_text, parked_text, parking_text
from vtoken.sentences.request import given_words
from vtoken.sentences.situation import MAX_LENGTH, situation
from vtoken.wire import Parking, Status

MB = 10**6


def parked(**figures: Any) -> Parking:
    values = {"capacity_bytes": 800 * MB, "used_bytes": 56 * MB, "peak_bytes": 90 * MB}
    return Parking(**values | {"tokens": 360, "clean_tokens": 0} | figures)


def status_of(parking: Parking | None) -> Status:
    return structs.replace(STATUS, parking=parking)


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"back_tokens": 1240}, "1,240 of 1,600 parked tokens are back"),
        ({"back_tokens": 1, "tokens": 0}, "1 of 1 parked token is back"),
        ({"restored_tokens": 1240}, ""),  # long ago
    ],
)
def test_what_is_back_is_told_of_all_that_was_parked(figures: dict[str, int], text: str) -> None:
    parking = parked(**figures)
    assert back_text(parking) == text
    said = situation(status_of(parking))
    assert said.startswith(f"Memory is free again: {text}; " if text else "OK: ")
    parking.waits_for = "memory"  # for the others
    assert situation(status_of(parking)).startswith(f"OK: {text}")


@pytest.mark.parametrize(
    ("waits_for", "why"),
    [
        ("", "360 tokens parked, coming back"),
        ("memory", "360 tokens parked until memory is free"),
        ("time", "360 tokens parked for a moment more"),
        ("resume", "360 tokens parked until reclamation is resumed"),
        ("budget", "360 tokens parked beyond the budgets"),
    ],
)
def test_the_sentence_says_why_parked_tokens_do_not_come_back(waits_for: Any, why: str) -> None:
    parking = parked(waits_for=waits_for)
    assert parked_text(parking) == why
    said = situation(status_of(parking))
    assert said.endswith(f"; {why}.")
    assert len(said) <= MAX_LENGTH


@pytest.mark.parametrize("parking", [None, parked(tokens=0)])
def test_nothing_is_said_while_nothing_is_parked(parking: Parking | None) -> None:
    assert "parked" not in situation(status_of(parking))


def test_everything_about_parking_is_one_line() -> None:
    assert parking_text(parked(tokens=0)) == (
        "no token parked; 56.0 MB of 800 MB of host memory used; 0 came back since the start"
    )
    text = parking_text(
        parked(
            restored_tokens=1240,
            thrashed_tokens=9,
            swapped_requests=2,
            dropped_tokens=7,
            fault="no 16 MiB",
        )
    )
    assert text == (
        "360 tokens parked, coming back; 56.0 MB of 800 MB of host memory used; 1,240 came back "
        "since the start, 9 of them gave way again within 5 s; 2 preempted requests kept in it, "
        "not computed again; 7 lost for want of it; nothing is "
        "parked: no 16 MiB"
    )


def test_what_preempted_requests_keep_in_host_memory_is_not_parked() -> None:
    assert parking_text(parked(tokens=0, waiting_tokens=760)) == (
        "no token parked; 56.0 MB of 800 MB of host memory used; 760 tokens of preempted requests "
        "wait in it; 0 came back since the start"
    )


def test_a_request_says_how_many_of_its_tokens_are_parked() -> None:
    row = structs.replace(
        ROW,
        live=600,
        dead=1440,
        given_tokens=1440,
        parked_tokens=1200,
        policy="h2o",
        budget_tokens=256,
        evict_when="pressure",
    )
    assert given_words(row) == (
        "kept 29.4% of 2,040 tokens, gave up 1,440 because memory was short (1,200 parked); "
        "344 above its floor, can give nothing"
    )
    row = structs.replace(row, given_tokens=1680, restored_tokens=240, givable_tokens=336)
    short = "kept 29.4% of 2,040 tokens, gave up 1,680 (1,200 parked, 240 back); can give 336"
    assert given_words(row, len(short)) == short
    assert given_words(row, len(short) + 16) == f"{short} above its floor"
