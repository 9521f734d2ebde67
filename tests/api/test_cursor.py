"""Deltas rebuild the newest frame after any changes in between."""

from __future__ import annotations

from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted import ScriptedEngine
from vtoken import wire
from vtoken.wire.engine_state import Difference, EngineState
from vtoken_api.fanout.cursor import TOPICS, StateCursor

with closing(ScriptedEngine(num_blocks=8)) as _engine:
    FRAME = msgspec.msgpack.encode(_engine.frame())


def new_frame() -> wire.Frame:
    """Eight blocks and a few requests, for a test to change."""
    return msgspec.msgpack.decode(FRAME, type=wire.Frame)


@st.composite
def frames(draw: st.DrawFn) -> EngineState:
    """Eight blocks and a few requests with arbitrary values."""
    live = draw(st.lists(st.integers(0, 3), min_size=8, max_size=8))
    flags = draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))
    owner = draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))
    rows = draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), max_size=4))
    frame = new_frame()
    template = frame.requests[0]
    frame.status.ts = draw(st.sampled_from((1.0, 2.0)))
    frame.live = np.array(live, dtype="<u2").tobytes()
    frame.flags = np.array(flags, dtype="u1").tobytes()
    frame.owner = np.array(owner, dtype="<u2").tobytes()
    frame.requests = [
        msgspec.structs.replace(template, id=name, live=count) for name, count in rows.items()
    ]
    return EngineState().after(Difference.of(frame))


@given(st.lists(frames(), min_size=2, max_size=5), st.booleans())
def test_snapshot_and_deltas_rebuild_every_frame(states: list[EngineState], packed: bool) -> None:
    cursor = StateCursor(frozenset(TOPICS), packed=packed)
    snapshot = cursor.snapshot(states[0])
    live = wire.unpack_array(snapshot["live"], "<u2").copy()
    flags = wire.unpack_array(snapshot["flags"], "u1").copy()
    owner = wire.unpack_array(snapshot["owner"], "<u2").copy()
    rows = {row.id: row for row in snapshot["requests"]}
    status = snapshot["status"]
    for state in states[1:]:
        fields = cursor.delta(state)
        if "block_ids" in fields:
            ids = wire.unpack_array(fields["block_ids"], "<u4")
            live[ids] = wire.unpack_array(fields["block_live"], "<u2")
            flags[ids] = wire.unpack_array(fields["block_flags"], "u1")
            owner[ids] = wire.unpack_array(fields["block_owner"], "<u2")
        rows |= {row.id: row for row in fields.get("requests_changed", [])}
        for name in fields.get("requests_removed", []):
            del rows[name]
        np.testing.assert_equal({"live": live, "flags": flags, "owner": owner}, state.blocks)
        assert rows == state.requests
        status = fields.get("status", status)
        assert status == state.status


@given(frames())
def test_unchanged_state_is_not_sent_again(state: EngineState) -> None:
    cursor = StateCursor(frozenset(TOPICS), packed=True)
    cursor.snapshot(state)
    assert cursor.delta(state) == {}


@given(frames(), frames())
def test_client_is_sent_its_topics_only(before: EngineState, after: EngineState) -> None:
    cursor = StateCursor(frozenset({"metrics"}), packed=True)
    snapshot = cursor.snapshot(before)
    assert (snapshot["live"], snapshot["flags"], snapshot["requests"]) == (None, None, None)
    assert set(cursor.delta(after)) <= {"status", "config"}


def test_delta_before_a_snapshot_is_an_error() -> None:
    state = EngineState().after(Difference.of(new_frame()))
    with pytest.raises(RuntimeError, match="snapshot before"):
        StateCursor(frozenset(TOPICS), packed=True).delta(state)
