"""The advice of any state that requests bring about: it agrees with the status that it stands in,
and its change does what it promises.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.core.test_statements import Server
from tests.support.account import contradictions
from vtoken.control import relief
from vtoken.control.outlook import Outlook
from vtoken.sentences.advice import advise
from vtoken.wire import (
    Advice,
    ConfigDocument,
    DraftFigures,
    FirstWaiting,
    Made,
    Parking,
    PatchResult,
    Peak,
    Relief,
    Remedy,
    Serving,
    Status,
    Trial,
)

GIVEN = r"([\d,]+) blocks? can be given"
STARTABLE = r"([\d,]+) of [\d,]+ can start"
AT_ONCE = STARTABLE + "(?! in )"
FIRST = FirstWaiting(
    "a", needed_blocks=3, withheld_blocks=0, short_blocks=2, reread_tokens=0, patience_s=0
)
SEEN = Counter[str]()  # advice, by its code


def state_of(seed: int, num_acts: int) -> Server:
    """An engine after random requests, changes and steps."""
    server = Server(seed)
    for _ in range(num_acts):
        server.act()
    return server


def number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else int(found[1].replace(",", ""))


def broken_promises(server: Server, status: Status) -> Iterator[str]:
    """What the most urgent advice promises and neither a dry run says nor the engine does.

    It is applied: do not use the server any more.
    """
    for one in status.advice:
        if one.level == "note":
            continue
        SEEN[one.code] += 1
        if one.change:
            yield from _of_dry_run(server, one)
    changes = [one for one in status.advice if one.level != "note" and one.change]
    if changes:
        yield from _of_change(server, changes[0])


def _of_dry_run(server: Server, one: Advice) -> Iterator[str]:
    result: PatchResult = server.live.call("patch_config", patch=one.change, validate_only=True)
    found = result.what_if
    assert found is not None
    promised = number(GIVEN, one.text), number(STARTABLE, one.text)
    says = found.givable_blocks, found.startable_requests
    for promise, figure in zip(promised, says, strict=True):
        if promise not in (None, figure):
            yield f"{one.text!r}, and the dry run says {says}"


def _of_change(server: Server, one: Advice) -> Iterator[str]:
    live, counters = server.live, server.live.runtime.counters.requests
    waited, ended = {r.id for r in live.core.waiting}, counters.finished + counters.preempted
    promised = number(GIVEN, one.text)
    live.call("patch_config", patch=one.change)
    live.runtime.requests.begin_step()  # the rules of the new configuration are in force
    memory = live.reporter.status().pressure
    if promised is not None and (memory is None or memory.givable_blocks != promised):
        yield f"{one.text!r}, and then {memory}"
    can_start = number(AT_ONCE, one.text) or 0
    for _ in range(12):
        if len(waited - {request.id for request in live.core.waiting}) >= can_start:
            SEEN["started"] += can_start
            return
        live.steps(1)
        if counters.finished + counters.preempted > ended:
            return  # they may owe it to that
    yield f"{one.text!r}, and of {waited} wait {[request.id for request in live.core.waiting]}"


@given(seed=st.integers(0, 10_000), num_acts=st.integers(5, 60))
@settings(max_examples=150, derandomize=True, phases=[Phase.generate], deadline=None)
def _every_state(seed: int, num_acts: int) -> None:
    server = state_of(seed, num_acts)
    try:
        said = server.said()
        assert contradictions(said, server.account, server.moment()) == []
        assert list(broken_promises(server, said.status)) == []
    finally:
        server.live.close()


def test_advice_agrees_with_its_status_and_its_change_does_what_it_promises() -> None:
    SEEN.clear()
    _every_state()
    assert {"floor", "resume", "patience", "compact", "memory", "requests"} <= SEEN.keys()
    assert SEEN["started"] > 5


@pytest.mark.parametrize("figure", ["givable_blocks", "startable_requests"])
def test_control_a_figure_that_is_not_the_planners_is_noticed(
    figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **figures: Any) -> Remedy:
        made = Remedy(*args, **figures)
        setattr(made, figure, getattr(made, figure) + 1)
        return made

    monkeypatch.setattr(relief, "Remedy", wrong)
    with pytest.raises(AssertionError, match=r"and the dry run says|waiting: "):
        _every_state()


def test_control_a_promise_that_dry_run_and_advice_agree_on_is_held_against_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if everybody that waits could always start."""
    monkeypatch.setattr(Outlook, "startable_requests", property(lambda one: len(one.waiting)))
    with pytest.raises(AssertionError, match=r"can start.*, and of "):
        _every_state()


def test_a_change_of_two_floors_fits_a_line_of_the_console_with_its_key(
    calm: tuple[Status, ConfigDocument],
) -> None:
    status, _ = calm
    status.budget_ratio, status.budget_floor_tokens, status.requests.waiting = 0.5, 256, 6
    status.fragmentation.held_for = "end"
    status.requests.first = FIRST
    change = {"budget_ratio": 0.22, "budget_floor_tokens": 113}
    status.relief = Relief([Remedy(change, 99, 2)], 0, None, 0, 0)
    floor = advise(status)[0]
    result = "2 of 6 can start, 99 blocks can be given"
    assert floor.text == f"floor 50% → 22%, least 256 → 113: {result}"
    assert len(f" [f] {floor.text}") <= 80


def test_advice_counts_nobody_who_waits_for_something_else_than_blocks(
    calm: tuple[Status, ConfigDocument],
) -> None:
    """`startable_requests` counts those that wait for blocks, and none does."""
    status, _ = calm
    status.requests.running, status.requests.waiting = 10, 4
    status.fragmentation.held_for = "end"
    status.relief = Relief([Remedy({"budget_ratio": 0.22}, 62, 0)], 0, 3, 0, 0)
    floor, requests = advise(status)
    assert floor.text.endswith(": 62 blocks can be given")
    assert requests.text.startswith("13 requests fit at once")
    status.requests.first = FIRST
    floor, requests = advise(status)
    assert floor.text.endswith(": 0 of 4 can start, 62 blocks can be given")
    assert requests.text.startswith("10 requests fit at once")


def test_a_remedy_that_gives_no_more_than_now_leaves_the_ways_out_without_a_change(
    calm: tuple[Status, ConfigDocument],
) -> None:
    """Nobody reads "1 missing" without a way out because the planner's figures are a second old."""
    status, _ = calm
    status.fragmentation.cause, status.fragmentation.held_for = "full", "giving"
    assert status.pressure is not None
    status.pressure.givable_blocks = 14
    status.relief = Relief([Remedy({"budget_ratio": 0.4}, 14, 2)], 0, 3, 0, 0)
    assert [one.code for one in advise(status) if one.level != "note"] == ["requests"]
    status.relief = Relief([Remedy({"budget_ratio": 0.4}, 15, 2)], 0, 3, 0, 0)
    assert [one.code for one in advise(status) if one.level != "note"] == ["floor"]


# ---------------------------------------------------------------- notes


@pytest.fixture
def calm() -> Iterator[tuple[Status, ConfigDocument]]:
    """The documents of an engine with ample memory."""
    server = state_of(0, 0)
    server.live.admit("a", 20, max_tokens=40)
    server.live.steps(2)
    yield server.live.reporter.status(), server.live.call("config")
    server.live.close()


def finished(status: Status, count: int = 2000) -> None:
    status.requests.finished = count


def parked(**figures: Any) -> Parking:
    """Half of the host memory is used."""
    few = {"capacity_bytes": 800, "used_bytes": 400, "peak_bytes": 400}
    return Parking(**{"tokens": 0, "clean_tokens": 0} | few | figures)


NOTES: dict[str, Callable[[Status, ConfigDocument], object]] = {
    "resume": lambda status, _: setattr(status.reclamation, "state", "paused"),
    "trial": lambda status, config: setattr(
        config, "trial", Trial(7, "root", status.ts - 3600, status.ts + 60)
    ),
    "void": lambda status, config: setattr(
        config, "made", Made("root", status.ts - 30, ["budget_tokens"])
    ),
    "moves": lambda status, _: (
        setattr(status.reclamation, "moved_tokens", 2000),
        setattr(status.reclamation, "moved_then_evicted_tokens", 600),
    ),
    "preemptions": lambda status, _: setattr(status.pressure, "preemptions_above_floor", 3),
    "parking": lambda status, config: (
        setattr(status.pressure, "given_tokens", 12_345),
        setattr(status, "parking", None),
        setattr(config, "desired", structs.replace(config.desired, park_bytes=0)),
    ),
    "thrash": lambda status, _: setattr(
        status, "parking", parked(restored_tokens=2000, thrashed_tokens=300)
    ),
    "canary": lambda status, _: (
        setattr(status.pressure, "kept_shares", {"0.5": 30, "1": 10}),
        setattr(status.pressure, "kept_share_sum", 22.0),
    ),
    "idle": lambda status, _: (
        finished(status),
        setattr(status, "peaks", [Peak("used_share", 0.3, status.ts)]),
    ),
    "length": lambda status, _: (
        finished(status),
        setattr(status, "serving", Serving(length_capped=300)),
    ),
    "drafts": lambda status, _: setattr(
        status, "drafts", [DraftFigures(status.config_revision, 5000, 600)]
    ),
    "prefix": lambda status, _: setattr(
        status, "serving", Serving(prefix_query_tokens=50_000, prefix_hit_tokens=900)
    ),
}


@pytest.mark.parametrize("code", NOTES)
def test_a_note_is_hidden_until_there_is_something_to_do(
    calm: tuple[Status, ConfigDocument], code: str
) -> None:
    status, config = calm
    assert advise(status, config) == []
    NOTES[code](status, config)
    (note,) = advise(status, config)
    assert (note.code, note.level) == (code, "note")
    assert re.search(r"\d|paused|canary", note.text)
    assert note.command.startswith("vtoken ") or ": " in note.text
    assert len(note.text.partition(" (")[0]) < 79, "it does not fit a line of the console"


@pytest.mark.parametrize(
    ("parking", "text", "change"),
    [
        (parked(), "", {}),
        (
            parked(dropped_tokens=900, peak_bytes=790),
            "900 tokens lost for want of host memory: it was full",
            {"park_bytes": 1600},
        ),
        (parked(dropped_tokens=900, peak_bytes=2000), "", {}),  # the setting was lowered
        (
            parked(fault="no 16 MiB", peak_bytes=500),
            "the host refused memory, nothing is parked: no 16 MiB",
            {"park_bytes": 500},
        ),
        (
            parked(fault="no 16 MiB", peak_bytes=0),
            "the host refused memory, nothing is parked: no 16 MiB",
            {},
        ),
    ],
)
def test_host_memory_that_is_full_or_refused_is_a_note_with_the_size_that_helps(
    calm: tuple[Status, ConfigDocument], parking: Parking, text: str, change: dict[str, int]
) -> None:
    status, config = calm
    status.parking = parking
    notes = advise(status, config)
    assert [(note.text, note.change) for note in notes] == ([(text, change)] if text else [])


def test_the_host_memory_that_is_advised_while_parking_is_off_is_the_size_of_the_pool(
    calm: tuple[Status, ConfigDocument],
) -> None:
    status, config = calm
    NOTES["parking"](status, config)
    status.reclamation.moved_tokens, status.reclamation.moved_bytes = 10, 4000
    (note,) = advise(status, config)
    assert note.change == {"park_bytes": status.blocks.total * status.block_size * 400}
