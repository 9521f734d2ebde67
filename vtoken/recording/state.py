"""The state that a stream's messages add up to, so that a recorder can write it down whole.

Knows the wire in its JSON form: arrays are lists. Applies messages that a server sent in order,
does not check them, and keeps the snapshot it was given to change it.
"""

from __future__ import annotations

from typing import cast

import msgspec

from vtoken import wire


class StreamState:
    """`take` every message; `keyframe` is the state after the last."""

    def __init__(self) -> None:
        self._hello: wire.Hello | None = None
        self._snapshot: wire.Snapshot | None = None
        self._requests: dict[str, wire.RequestRow] = {}
        self._last: wire.Message | None = None

    def take(self, message: wire.StreamMessage) -> None:
        self._last = message
        if isinstance(message, wire.Hello):
            self._hello = message
            if not message.resumed:
                self._snapshot = None
        elif isinstance(message, wire.Snapshot):
            self._snapshot = message
            self._requests = {row.id: row for row in message.requests or ()}
        elif isinstance(message, wire.Delta) and self._snapshot is not None:
            self._apply(self._snapshot, message)

    def keyframe(self) -> tuple[wire.Hello, wire.Snapshot] | None:
        """`hello` and `snapshot` that stand for all messages so far; None before a snapshot.

        They take the places of the last two messages in the order of `seq`, so that the next one of
        the stream continues them.
        """
        if self._hello is None or self._snapshot is None or self._last is None:
            return None
        epoch, seq, step, ts = self._hello.epoch, self._last.seq, self._last.step, self._last.ts
        hello = msgspec.structs.replace(self._hello, seq=seq - 1, step=step, ts=ts, resumed=False)
        requests = None if self._snapshot.requests is None else list(self._requests.values())
        snapshot = msgspec.structs.replace(
            self._snapshot, epoch=epoch, seq=seq, step=step, ts=ts, requests=requests
        )
        return hello, snapshot

    def _apply(self, held: wire.Snapshot, delta: wire.Delta) -> None:
        if delta.block_ids is not None:
            ids = cast("list[int]", delta.block_ids)
            for name, values in (
                ("live", delta.block_live),
                ("flags", delta.block_flags),
                ("owner", delta.block_owner),
            ):
                array = cast("list[int] | None", getattr(held, name))
                if values is not None and array:
                    for block, value in zip(ids, cast("list[int]", values), strict=True):
                        array[block] = value
        for gone in delta.requests_removed or ():
            self._requests.pop(gone, None)
        for row in delta.requests_changed or ():
            self._requests[row.id] = row
        held.status = delta.status or held.status
        held.config = delta.config or held.config
