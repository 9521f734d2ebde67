"""Filters: one syntax for requests and blocks; invalid filters hide nothing."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.core.test_stream_reducer import hello, row, snapshot
from vtoken import wire
from vtoken.wire.reducer import StreamState, apply
from vtoken_console.frame.filters import block_mask, parse, shortfall


def model() -> StreamState:
    """Six blocks: 0 free, 1-2 of cmpl-a (h2o), 3-4 of cmpl-b (none), 5 of an unknown owner."""
    rows = [
        msgspec.structs.replace(row("cmpl-a"), policy="h2o", number=1),
        msgspec.structs.replace(row("cmpl-b"), number=2, state="waiting"),
    ]
    shot = msgspec.structs.replace(
        snapshot(num_blocks=6),
        requests=rows,
        live=np.array([0, 16, 3, 16, 0, 16], "<u2").tobytes(),
        flags=bytes([0, 3, 1, 5, 1, 1]),
        owner=np.array([0, 1, 1, 2, 2, 9], "<u2").tobytes(),
    )
    return apply(apply(StreamState(), hello(num_blocks=6)), shot)


@pytest.mark.parametrize(
    ("text", "blocks", "requests"),
    [
        ("", [0, 1, 2, 3, 4, 5], ["cmpl-a", "cmpl-b"]),
        ("req:l-a", [1, 2], ["cmpl-a"]),
        ("req:l-a,l-b", [1, 2, 3, 4], ["cmpl-a", "cmpl-b"]),
        ("policy:H2O", [1, 2], ["cmpl-a"]),
        ("h2o", [1, 2], ["cmpl-a"]),
        ("cmpl-b", [3, 4], ["cmpl-b"]),
        ("state:free", [0], []),
        ("state:shared", [1], ["cmpl-a"]),
        ("state:sha", [1], ["cmpl-a"]),
        ("state:shared,cached", [1, 3], ["cmpl-a", "cmpl-b"]),
        ("req:l-a state:dead", [2], ["cmpl-a"]),
        ("state:waiting", [3, 4], ["cmpl-b"]),
        ("req:zzz", [], []),
    ],
)
def test_filter_matches_these_blocks_and_requests(
    text: str, blocks: list[int], requests: list[str]
) -> None:
    wanted, now = parse(text), model()
    assert wanted.problem == ""
    assert np.flatnonzero(block_mask(wanted, now)).tolist() == blocks
    assert [r.id for r in wanted.rows(now)] == requests


@pytest.mark.parametrize(
    ("text", "problem"),
    [("colour:red", "colour: unknown"), ("state:purple", "state:purple is unknown")],
)
def test_invalid_filter_is_reported_and_hides_nothing(text: str, problem: str) -> None:
    wanted = parse(text)
    assert problem in wanted.problem
    assert not wanted
    assert [r.id for r in wanted.rows(model())] == ["cmpl-a", "cmpl-b"]


@pytest.mark.parametrize("text", ["req:", "state:", "state:shared,"])
def test_partly_typed_terms_hide_only_what_they_exclude(text: str) -> None:
    wanted = parse(text)
    assert wanted.problem == ""
    assert bool(wanted) == (text == "state:shared,")


def test_without_owners_blocks_are_not_filtered_by_request_with_a_note() -> None:
    state = model().engine
    told = {name: array for name, array in state.blocks.items() if name != "owner"}
    unknown = replace(model(), engine=replace(state, blocks=told))
    assert block_mask(parse("req:l-a"), unknown).all()
    assert "does not report owners" in shortfall(parse("req:l-a"), unknown)
    assert shortfall(parse("state:free"), unknown) == ""
    assert np.flatnonzero(block_mask(parse("state:free"), unknown)).tolist() == [0]


def test_every_state_of_a_row_can_be_filtered() -> None:
    for state in set(wire.RequestState.__args__) - {"finished"}:  # those have no row
        assert parse(f"state:{state}").problem == ""


@pytest.mark.parametrize("text", ["8ea2640e", "1_0a1b2c3d", "req:1_0A1B"])
def test_a_short_id_as_the_rows_show_it_is_part_of_an_id(text: str) -> None:
    sample, other = row("1_chatcmpl-8ea2640e91c84f0f-0a1b2c3d"), row("chatcmpl-job-4e5f6a7b")
    assert [parse(text).matches(one) for one in (sample, other)] == [True, False]
