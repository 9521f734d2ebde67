"""The event log: numbers without gaps, one ring per kind, pages, and draining once."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.harness import make_engine
from vtoken.core.runtime.events import MAX_DRAINED, EventLog
from vtoken.wire import FREQUENT_KINDS, EventKind

KINDS: tuple[EventKind, ...] = get_args(EventKind)


def filled(*kinds: EventKind, capacity: int = 4) -> EventLog:
    log = EventLog(capacity)
    for step, kind in enumerate(kinds):
        log.add(step, kind, "event", {"n": step})
    return log


def test_events_are_numbered_from_one_without_gaps_whatever_their_kind() -> None:
    log = filled("config", "eviction", "config", "reclaimed")
    page = log.page(0, 10)
    assert [e.seq for e in page.events] == [1, 2, 3, 4]
    assert (page.first_seq, page.last_seq) == (1, 4)


@pytest.mark.parametrize("frequent", KINDS)
def test_events_of_one_kind_never_push_out_those_of_another(frequent: EventKind) -> None:
    others = [kind for kind in KINDS if kind != frequent]
    log = filled(*others, *[frequent] * 50, "server")
    kept = Counter(event.kind for event in log.page(0, 100).events)
    assert set(kept) == set(KINDS)
    assert kept[frequent] == 4
    assert log.page(0, 100).first_seq == 1


def test_what_operators_look_for_later_is_not_among_the_frequent_kinds() -> None:
    rare = {"config", "operation", "violation", "server", "canary", "weights"}
    assert set(KINDS) - FREQUENT_KINDS == rare


def test_a_page_starts_after_the_number_asked_for_and_is_bounded() -> None:
    log = filled("config", "eviction", "config", "config")
    assert [e.seq for e in log.page(1, 2).events] == [2, 3]
    assert log.page(4, 10).events == []
    assert log.page(99, 10).events == []


def test_without_a_number_a_page_has_the_newest_events() -> None:
    log = filled("config", "eviction", "operation", "config", "eviction", "config", capacity=9)
    assert [e.seq for e in log.page(None, 4).events] == [3, 4, 5, 6]
    assert [e.seq for e in log.page(None, 9).events] == [1, 2, 3, 4, 5, 6]
    assert [e.seq for e in log.page(None, 2, "config").events] == [4, 6]
    assert log.page(None, 2, "violation").events == EventLog().page(None, 2).events == []


def test_a_page_of_one_kind_has_all_of_it_and_nothing_else() -> None:
    log = filled("config", "eviction", "operation", "config", "eviction", "config", capacity=9)
    assert [e.seq for e in log.page(0, 10, "config").events] == [1, 4, 6]
    assert [e.seq for e in log.page(1, 1, "config").events] == [4]
    assert [e.seq for e in log.page(2, 10, "eviction").events] == [5]
    assert log.page(0, 10, "violation").events == []
    assert log.page(0, 10, "violation").last_seq == 6


def test_an_empty_log_says_which_event_would_come_first() -> None:
    page = EventLog().page(0, 10)
    assert (page.events, page.first_seq, page.last_seq) == ([], 1, 0)


def test_draining_hands_each_event_out_once_and_keeps_the_rings() -> None:
    log = filled("config", "eviction")
    assert [e.seq for e in log.drain()] == [1, 2]
    assert log.drain() == []
    log.add(9, "config", "more", {})
    assert [e.seq for e in log.drain()] == [3]
    assert len(log.page(0, 10).events) == 3


def test_what_nobody_has_drained_for_long_loses_no_rare_event() -> None:
    log = EventLog()
    log.add(0, "config", "the change", {})
    for step in range(12_000):
        log.add(step, "relocation", "moved", {})
    drained = log.drain()
    assert drained[0].kind == "config"
    assert len(drained) == MAX_DRAINED
    while events := log.drain():
        assert len(events) <= MAX_DRAINED
        drained += events
    assert [e.seq for e in drained] == [1, *range(12_001 - 5_000 + 1, 12_002)]


@given(
    st.lists(st.sampled_from(KINDS[:4]), max_size=40),
    st.integers(1, 6),
)
@settings(max_examples=100)
def test_pages_join_without_gap_or_repetition(kinds: list[EventKind], limit: int) -> None:
    log = filled(*kinds, capacity=5)
    whole = [e.seq for e in log.page(0, 1000).events]
    seen: list[int] = []
    while events := log.page(seen[-1] if seen else 0, limit).events:
        seen += [e.seq for e in events]
    assert seen == whole == sorted(set(whole))
    for kind in KINDS:
        assert {i + 1 for i, k in enumerate(kinds) if k == kind and kinds[i:].count(k) <= 5} <= set(
            whole
        )


def test_an_engine_at_work_tells_every_event_with_its_step() -> None:
    with make_engine(config=None) as engine:
        engine.steps(60)
        events = engine.call("events", limit=10_000).events
        assert [e.seq for e in events] == [*range(1, len(events) + 1)]
        assert [e.step for e in events] == sorted(e.step for e in events)
        assert {"eviction", "relocation"} <= {e.kind for e in events}
        evicted = sum(e.data["tokens"] for e in events if e.kind == "eviction")
        assert evicted == engine.core.runtime.counters.tokens.evicted
        reclaimed = sum(e.data["blocks"] for e in events if e.kind == "reclaimed")
        rounds = [e.data for e in events if e.kind == "relocation"]
        reclaimed += sum(data["freed_blocks"] - data["retaken_blocks"] for data in rounds)
        assert reclaimed == engine.core.runtime.counters.reclamation.reclaimed_blocks
