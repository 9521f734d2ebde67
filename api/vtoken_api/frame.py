"""One frame of engine state, put together once for all clients, and what differs between two.

Knows the wire and numpy. N blocks; `live` is u16[N], `flags` u8[N], `owner` u16[N] (empty where the
engine does not tell it), never written once they are in a view. Invariants:
1. a view is the state that the engine published under one number, or answered; where the frame
   before a change is missing there is no view, until a whole frame comes
2. a snapshot with every later delta applied, in order, equals the newest frame that the cursor was
   given
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vtoken import wire

STATE_TOPICS = frozenset({"blocks", "requests", "metrics"})
TOPICS = (*sorted(STATE_TOPICS), "events")


@dataclass(frozen=True, slots=True)
class FrameView:
    """A frame with its arrays and its request rows by id."""

    status: wire.Status
    config: wire.ConfigDocument
    live: NDArray[np.uint16]
    flags: NDArray[np.uint8]
    owner: NDArray[np.uint16]
    requests: dict[str, wire.RequestRow]

    @classmethod
    def of(cls, frame: wire.Frame) -> FrameView:
        return cls(
            status=frame.status,
            config=frame.config,
            live=np.frombuffer(frame.live, dtype="<u2"),
            flags=np.frombuffer(frame.flags, dtype="u1"),
            owner=np.frombuffer(frame.owner, dtype="<u2"),
            requests={row.id: row for row in frame.requests},
        )

    @classmethod
    def decode(cls, payload: bytes) -> FrameView:
        return cls.of(msgspec.msgpack.decode(payload, type=wire.Frame))

    def followed_by(self, frame: wire.Frame) -> FrameView:
        """The view of `frame`, whose arrays are of `block_ids` and which follows this one."""
        assert frame.block_ids is not None
        ids = np.frombuffer(frame.block_ids, dtype="<u4")
        parts = FrameView.of(frame)
        for name, _ in wire.BLOCK_ARRAYS:
            array = getattr(self, name).copy()
            array[ids] = getattr(parts, name)
            parts = replace(parts, **{name: array})
        return parts


class FrameChain:
    """The published frames of one engine, as they come."""

    def __init__(self) -> None:
        self._number = 0
        self._view: FrameView | None = None

    def take(self, payload: bytes) -> FrameView | None:
        """The view of the frame in `payload`; None where one before it is missing: the chain goes
        on with the next whole frame."""
        frame = msgspec.msgpack.decode(payload, type=wire.Frame)
        follows = frame.number == self._number + 1
        self._number = frame.number
        if frame.block_ids is None:
            self._view = FrameView.of(frame)
        elif self._view is not None:
            self._view = self._view.followed_by(frame) if follows else None
        return self._view


class StateCursor:
    """What one client was last sent, and the fields of its next message."""

    def __init__(self, topics: frozenset[str], *, packed: bool) -> None:
        self._topics = topics
        self._packed = packed
        self._sent: FrameView | None = None

    def snapshot(self, view: FrameView) -> dict[str, Any]:
        """Fields of a `wire.Snapshot` of `view`; the next delta starts from here."""
        self._sent = view
        blocks = "blocks" in self._topics
        return {
            "status": view.status if "metrics" in self._topics else None,
            "config": view.config,
            "live": self._pack(view.live) if blocks else None,
            "flags": self._pack(view.flags) if blocks else None,
            "owner": self._pack(view.owner) if blocks and view.owner.size else None,
            "requests": list(view.requests.values()) if "requests" in self._topics else None,
        }

    def delta(self, view: FrameView) -> dict[str, Any]:
        """Fields of a `wire.Delta` from what was last sent to `view`; {} when nothing differs."""
        sent, fields = self._sent, {}
        if sent is None:
            raise RuntimeError("a delta needs a snapshot before it")
        if "blocks" in self._topics:
            fields.update(self._changed_blocks(sent, view))
        if "requests" in self._topics:
            fields.update(_changed_requests(sent.requests, view.requests))
        if "metrics" in self._topics and view.status != sent.status:
            fields["status"] = view.status
        if view.config != sent.config:
            fields["config"] = view.config
        self._sent = view
        return fields

    def _changed_blocks(self, sent: FrameView, view: FrameView) -> dict[str, Any]:
        changed = (sent.live != view.live) | (sent.flags != view.flags)
        told = view.owner.size > 0
        if told:
            changed |= sent.owner != view.owner
        ids = np.flatnonzero(changed)
        if not ids.size:
            return {}
        return {
            "block_ids": self._pack(ids.astype("<u4")),
            "block_live": self._pack(view.live[ids]),
            "block_flags": self._pack(view.flags[ids]),
            **({"block_owner": self._pack(view.owner[ids])} if told else {}),
        }

    def _pack(self, values: NDArray[Any]) -> wire.PackedArray:
        return wire.pack_array(values, packed=self._packed)


def _changed_requests(
    sent: dict[str, wire.RequestRow], now: dict[str, wire.RequestRow]
) -> dict[str, Any]:
    changed = [row for key, row in now.items() if sent.get(key) != row]
    removed = [key for key in sent if key not in now]
    return {
        **({"requests_changed": changed} if changed else {}),
        **({"requests_removed": removed} if removed else {}),
    }
