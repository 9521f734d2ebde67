"""A key frame: the two messages that replace all messages of a stream so far, in JSON form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vtoken import wire

if TYPE_CHECKING:
    from vtoken.stream.reducer import StreamState


def keyframe(state: StreamState) -> tuple[wire.Hello, wire.Snapshot] | None:
    """The `hello` and `snapshot` that replace all messages so far; None before a snapshot.

    They have the `seq` of the last two messages, so that the next message of the stream continues
    them.
    """
    if state.hello is None or state.config is None or not state.synced:
        return None
    hello = msgspec.structs.replace(
        state.hello, seq=state.seq - 1, step=state.step, ts=state.ts, resumed=False
    )
    snapshot = wire.Snapshot(
        epoch=state.epoch,
        seq=state.seq,
        step=state.step,
        ts=state.ts,
        status=state.status,
        config=state.config,
        live=state.live.tolist() if len(state.live) else None,
        flags=state.flags.tolist() if len(state.flags) else None,
        requests=list(state.requests.values()) if "requests" in hello.topics else None,
        owner=state.owner.tolist() if len(state.owner) else None,
    )
    return hello, snapshot
