"""Activity: the observed history of blocks is exact, bounded and reset."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.core.test_stream_reducer import delta, head, hello, snapshot
from vtoken import wire
from vtoken.wire.reducer import StreamState, apply, with_events
from vtoken_console.feed import activity as module
from vtoken_console.feed.activity import FADE_S, Activity

ALL_FREE = msgspec.structs.replace(
    snapshot(), live=bytes(8), flags=bytes(4), owner=bytes(8), requests=[]
)


def start(first: wire.Snapshot | None = None) -> tuple[StreamState, Activity]:
    model = apply(apply(StreamState(), hello()), first or snapshot())
    activity = Activity()
    activity.observe(model, now=0.0)
    return model, activity


def at(message: wire.Delta, ts: float, flags: list[int] | None = None) -> wire.Delta:
    message = msgspec.structs.replace(message, ts=ts)
    return message if flags is None else msgspec.structs.replace(message, block_flags=bytes(flags))


def moved(seq: int, sources: list[int], into: list[int], tokens: int = 5) -> wire.EventMessage:
    data = {
        "request_id": "cmpl-a91f",
        "moved_tokens": tokens,
        "source_blocks": sources,
        "destination_blocks": into,
    }
    event = wire.Event(seq=seq, ts=9.0, step=seq, kind="relocation", summary="moved", data=data)
    return wire.EventMessage(**head(seq + 1), event=event)


def test_a_block_that_is_only_in_flight_has_no_transition() -> None:
    model, activity = start()
    model = apply(model, at(delta(2, [1], [1]), 11.0, flags=[1 | wire.FLAG_IN_FLIGHT]))
    activity.observe(model, now=1.0)
    assert activity.history(1, ()) == []


def test_history_lists_transitions_newest_first_with_their_owner() -> None:
    model, activity = start(ALL_FREE)
    taken = msgspec.structs.replace(
        at(delta(2, [3], [4]), 5.0, flags=[1]), block_owner=np.array([7], "<u2").tobytes()
    )
    model = apply(model, taken)
    activity.observe(model, now=1.0)
    model = apply(model, at(delta(3, [3], [4]), 6.0, flags=[1 | wire.FLAG_SHARED]))
    activity.observe(model, now=2.0)
    model = apply(model, at(delta(4, [3], [0]), 7.0, flags=[0]))
    activity.observe(model, now=3.0)
    history = activity.history(3, ())
    assert [(e.ts, e.text) for e in history] == [
        (7.0, "freed by #7"),
        (6.0, "became shared"),
        (5.0, "taken by #7"),
    ]
    assert activity.history(2, ()) == []


def test_history_stays_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORY", 8)
    model, activity = start(ALL_FREE)
    for seq in range(2, 22):
        model = apply(model, at(delta(seq, [1], [0]), float(seq), flags=[seq % 2]))
        activity.observe(model, now=float(seq))
    history = activity.history(1, ())
    assert len(history) == 8
    assert [e.ts for e in history] == [float(seq) for seq in range(21, 13, -1)]


def test_movement_fades() -> None:
    model, activity = start()
    model = apply(apply(model, moved(1, [1], [2])), moved(2, [3], [2], tokens=7))
    activity.observe(model, now=10.0)
    assert activity.is_moving(10.0)
    left, arrived = activity.moves(10.0)
    assert left.tolist() == [0, 1, 0, 1]
    assert arrived.tolist() == [0, 0, 1, 0]
    left, _ = activity.moves(10.0 + FADE_S / 2)
    assert left[1] == pytest.approx(0.5)
    assert not activity.is_moving(10.01 + FADE_S)
    assert activity.moves(10.01 + FADE_S)[0].max() == 0
    history = activity.history(1, model.events)
    assert [e.text for e in history] == ["tokens moved out, of cmpl-a91f"]


def test_moves_before_the_first_model_are_not_drawn() -> None:
    model = apply(apply(apply(StreamState(), hello()), snapshot()), moved(1, [1], [2]))
    activity = Activity()
    activity.observe(model, now=0.0)
    assert not activity.is_moving(0.0)


def test_a_log_that_is_loaded_later_is_not_drawn() -> None:
    model, activity = start()
    model = apply(model, at(delta(2, [], []), 100.0))
    activity.observe(model, now=1.0)
    past = moved(1, [1], [2]).event
    model = with_events(model, [past])
    activity.observe(model, now=1.1)
    assert not activity.is_moving(1.1)
    assert not activity.moves(1.1)[0].any()
    recent = msgspec.structs.replace(past, seq=2, ts=100.0 - FADE_S / 2)
    activity.observe(with_events(model, [recent]), now=1.2)
    assert activity.is_moving(1.2)
    assert activity.moves(1.2)[0].tolist() == [0, 1, 0, 0]


def test_block_ids_outside_the_pool_are_ignored() -> None:
    model, activity = start()
    activity.observe(apply(model, moved(1, [1, 99], [-1])), now=1.0)
    left, arrived = activity.moves(1.0)
    assert (left.tolist(), arrived.tolist()) == ([0, 1, 0, 0], [0, 0, 0, 0])


@pytest.mark.parametrize("how", ["restart", "geometry", "seek"])
def test_activity_is_reset_on_restart_resize_and_clock_going_back(how: str) -> None:
    model, activity = start()
    model = apply(model, at(delta(2, [1], [9]), 50.0, flags=[1 | wire.FLAG_SHARED]))
    activity.observe(model, now=1.0)
    assert activity.history(1, ()) != []
    epoch, blocks = ("b", 4) if how == "restart" else ("a", 9 if how == "geometry" else 4)
    model = apply(model, hello(epoch=epoch, num_blocks=blocks))
    model = apply(model, snapshot(epoch=epoch, num_blocks=blocks))
    ts = 3.0 if how == "seek" else 60.0
    model = apply(model, msgspec.structs.replace(delta(2, [], [], epoch=epoch), ts=ts))
    activity.observe(model, now=2.0)
    assert activity.history(1, ()) == []
    assert activity.since == ts
    assert activity.num_blocks == blocks
