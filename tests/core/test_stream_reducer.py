"""The stream's reducer: messages are applied completely and in order, or not at all."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.documents import DESCRIBED, FRAME, ROW, hello_of
from vtoken import wire
from vtoken.wire.reducer import MAX_EVENTS, ResyncNeeded, StreamState, apply, with_events


def head(seq: int, epoch: str = "a") -> dict[str, object]:
    return {"epoch": epoch, "seq": seq, "step": seq, "ts": float(seq)}


def hello(seq: int = 0, epoch: str = "a", num_blocks: int = 4) -> wire.Hello:
    geometry = replace(DESCRIBED.geometry, num_blocks=num_blocks)
    return hello_of(DESCRIBED, **head(seq, epoch), geometry=geometry)


def row(name: str, live: int = 1) -> wire.RequestRow:
    return replace(ROW, id=name, live=live, policy="none")


def snapshot(seq: int = 1, epoch: str = "a", num_blocks: int = 4) -> wire.Snapshot:
    return wire.Snapshot(
        **head(seq, epoch),
        status=None,
        config=FRAME.config,
        live=np.arange(num_blocks, dtype="<u2").tobytes(),
        flags=bytes([0] + [1] * (num_blocks - 1)),
        requests=[row("r1"), row("r2")],
    )


def delta(seq: int, ids: list[int], live: list[int], epoch: str = "a") -> wire.Delta:
    return wire.Delta(
        **head(seq, epoch),
        block_ids=np.array(ids, "<u4").tobytes(),
        block_live=np.array(live, "<u2").tobytes(),
        block_flags=np.ones(len(ids), "u1").tobytes(),
    )


def event(seq: int, kind: wire.EventKind = "server") -> wire.Event:
    return wire.Event(seq=seq, ts=0.0, step=seq, kind=kind, summary=f"event {seq}")


def synced() -> StreamState:
    return apply(apply(StreamState(), hello()), snapshot())


def test_delta_changes_only_the_named_blocks() -> None:
    before = synced()
    after = apply(before, delta(2, [1, 3], [9, 8]))
    assert after.live.tolist() == [0, 9, 2, 8]
    assert before.live.tolist() == [0, 1, 2, 3]  # the older model is untouched


def test_json_arrays_are_read_like_packed_ones() -> None:
    message = msgspec.json.decode(
        msgspec.json.encode(wire.Delta(**head(2), block_ids=[1], block_live=[5], block_flags=[3])),
        type=wire.StreamMessage,
    )
    after = apply(synced(), message)
    assert (after.live[1], after.flags[1]) == (5, 3)


def with_owners(owners: list[int]) -> wire.Snapshot:
    return replace(snapshot(), owner=np.array(owners, "<u2").tobytes())


def test_owners_follow_the_deltas_that_name_them() -> None:
    model = apply(apply(StreamState(), hello()), with_owners([0, 3, 3, 0]))
    assert model.owner.tolist() == [0, 3, 3, 0]
    message = replace(delta(2, [1, 3], [9, 8]), block_owner=np.array([0, 7], "<u2").tobytes())
    assert apply(model, message).owner.tolist() == [0, 0, 3, 7]
    assert model.owner.tolist() == [0, 3, 3, 0]


def test_server_that_tells_no_owners_leaves_them_unknown() -> None:
    model = apply(synced(), delta(2, [1], [9]))
    assert len(model.owner) == 0
    assert model.ts == 2.0


@pytest.mark.parametrize(
    ("before", "message", "why"),
    [
        *(
            ("synced", delta(seq, [1], [1]), f"expected message 2, found {seq}")
            for seq in (1, 3, 7)
        ),
        ("synced", delta(2, [1], [1], epoch="b"), "epoch changed from a to b"),
        ("synced", delta(2, [4], [1]), "4 is out of bounds"),
        ("new", snapshot(), "expected hello first, found snapshot"),
        ("hello", delta(1, [1], [1]), "expected snapshot, found delta"),
        ("hello", snapshot(num_blocks=9), "live has 9 blocks, expected 4"),
        ("hello", with_owners([0, 1]), r"snapshot.owner has 2 blocks, expected 4"),
    ],
)
def test_a_message_that_does_not_follow_orders_a_resync(
    before: str, message: wire.StreamMessage, why: str
) -> None:
    states = {"new": StreamState(), "hello": apply(StreamState(), hello()), "synced": synced()}
    with pytest.raises(ResyncNeeded, match=why):
        apply(states[before], message)


def test_requests_change_and_leave() -> None:
    message = wire.Delta(
        **head(2), requests_changed=[row("r2", live=7), row("r3")], requests_removed=["r1"]
    )
    after = apply(synced(), message)
    assert {k: r.live for k, r in after.requests.items()} == {"r2": 7, "r3": 1}


def test_request_that_left_and_came_back_in_one_delta_is_kept() -> None:
    message = wire.Delta(**head(2), requests_changed=[row("r1", 5)], requests_removed=["r1"])
    assert apply(synced(), message).requests["r1"].live == 5


def test_new_epoch_forgets_the_events_and_same_epoch_keeps_them() -> None:
    model = apply(synced(), wire.EventMessage(**head(2), event=event(1)))
    assert len(apply(model, hello(0)).events) == 1
    assert apply(model, hello(0, epoch="b")).events == ()


def test_after_hello_the_model_waits_for_a_snapshot() -> None:
    assert not apply(synced(), hello(0)).synced


def test_dropped_is_counted_and_the_stream_goes_on() -> None:
    model = apply(synced(), wire.Dropped(**head(2), n=40))
    model = apply(model, snapshot(3))
    assert (model.missed_events, model.synced) == (40, True)


def test_heartbeat_moves_seq_only() -> None:
    before = synced()
    after = apply(before, wire.Heartbeat(**head(2)))
    assert after.seq == 2
    assert after.live is before.live


def test_events_are_ordered_unique_and_bounded() -> None:
    model = with_events(StreamState(), [event(3), event(1)])
    model = with_events(model, [event(2), event(3)])
    assert [e.seq for e in model.events] == [1, 2, 3]
    model = with_events(model, [event(n) for n in range(4, MAX_EVENTS + 50)])
    assert len(model.events) == MAX_EVENTS
    assert model.events[-1].seq == MAX_EVENTS + 49


def test_frequent_events_never_push_out_a_change_or_a_violation() -> None:
    rare = [event(1, "config"), event(2, "violation"), event(3, "operation"), event(4, "server")]
    model = with_events(StreamState(), rare)
    for n in range(5, 2 * MAX_EVENTS):
        model = with_events(model, [event(n, "relocation")])
    assert list(model.events[:4]) == rare
    assert len(model.events) == 4 + MAX_EVENTS
    assert model.events[-1].seq == 2 * MAX_EVENTS - 1
