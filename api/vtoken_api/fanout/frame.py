"""Views of engine state, decoded once for all clients, and deltas between two views.

A view's arrays, of N blocks each, are never written. Invariants:
1. a view is the state that the engine published under one frame number, or returned to a command;
   after a lost frame there is no view until the next full frame
2. a snapshot with every later delta applied, in order, equals the newest view that the cursor was
   given
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vtoken import wire
from vtoken.wire.frames import Arrays, block_arrays, changed_blocks

STATE_TOPICS = frozenset({"blocks", "requests", "metrics"})
TOPICS = (*sorted(STATE_TOPICS), "events")


@dataclass(frozen=True, slots=True)
class FrameView:
    """The blocks at `step` and the newest status, which carries its own step."""

    step: int
    status: wire.Status
    config: wire.ConfigDocument
    blocks: Arrays
    requests: dict[str, wire.RequestRow]

    @classmethod
    def of(cls, frame: wire.Frame) -> FrameView:
        """The view of a full frame."""
        assert frame.status is not None
        assert frame.config is not None
        rows = {row.id: row for row in frame.requests or ()}
        return cls(frame.step, frame.status, frame.config, block_arrays(frame), rows)

    def applying(self, frame: wire.Frame) -> FrameView:
        """This view with the changes of an incremental frame."""
        blocks = block_arrays(frame)
        if frame.block_ids is not None:
            ids = np.frombuffer(frame.block_ids, dtype="<u4")
            parts = {name: _with(self.blocks[name], ids, part) for name, part in blocks.items()}
            blocks = {**self.blocks, **parts}
        if frame.status is None:
            return replace(self, step=frame.step, blocks=blocks)
        return replace(FrameView.of(frame), blocks=blocks)


def _with(before: NDArray[Any], ids: NDArray[np.uint32], values: NDArray[Any]) -> NDArray[Any]:
    """A copy of `before` with `values` [k] at `ids` [k]."""
    after = before.copy()
    after[ids] = values
    return after


class FrameChain:
    """Applies the published frames of one engine in order."""

    def __init__(self) -> None:
        self._number = 0
        self._view: FrameView | None = None

    def take(self, payload: bytes) -> FrameView | None:
        """The view after the frame in `payload`; None after a lost frame, until the next full
        frame."""
        frame = msgspec.msgpack.decode(payload, type=wire.Frame)
        follows = frame.number == self._number + 1
        self._number = frame.number
        if frame.block_ids is None and frame.status is not None:
            self._view = FrameView.of(frame)
        elif self._view is not None:
            self._view = self._view.applying(frame) if follows else None
        return self._view


class StateCursor:
    """The view that one client was last sent; computes the fields of its next message."""

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
            **{name: self._pack(a) if blocks else None for name, a in view.blocks.items()},
            "requests": list(view.requests.values()) if "requests" in self._topics else None,
        }

    def delta(self, view: FrameView) -> dict[str, Any]:
        """Fields of a `wire.Delta` from the last view to `view`; {} if nothing differs."""
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
        ids = changed_blocks(sent.blocks, view.blocks)
        if not ids.size:
            return {}
        parts = {f"block_{name}": self._pack(array[ids]) for name, array in view.blocks.items()}
        return {"block_ids": self._pack(ids.astype("<u4")), **parts}

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
