"""The published frames of one engine: numbered, each reduced to the change since the last one.

Independent of sockets and of the frame's source. Changes are found by comparing the frames' own
arrays of N blocks, so the engine does not track them. Invariants:
1. numbers increase by one
2. a frame is complete if it has no `block_ids` and has a status (with rows and configuration)
3. any other frame n omits what equals frame n - 1: with `block_ids`, all other blocks; without
   a status, the status, which stays that of the newest frame that has one
A reader that has frame n - 1 can apply frame n; any other reader waits for a complete frame.
"""

from __future__ import annotations

import msgspec

from vtoken.wire.bus import Frame
from vtoken.wire.views import Change, View

# Share of all blocks: a changed block needs 4 more bytes, its id, than in a complete frame.
MAX_CHANGED = 5 / 9


class FrameSequence:
    """The engine's end: numbers frames and reduces each to its change."""

    def __init__(self) -> None:
        self._number = 0
        self._published = View()  # the blocks, in arrays of its own that are written in place

    def next(self, frame: Frame, *, whole: bool) -> Frame:
        """The frame to publish, from `frame` with all blocks; `whole`: do not reduce it."""
        self._number += 1
        blocks = Change.of(frame).blocks
        if self._published.blocks and not whole:
            change = Change.between(self._published, View(blocks=blocks))
            ids = change.block_ids
            if ids is not None and len(ids) <= MAX_CHANGED * len(blocks["live"]):
                change.write(self._published.blocks)
                parts = {name: part.data for name, part in change.blocks.items()}
                return msgspec.structs.replace(
                    frame, number=self._number, block_ids=ids.data, **parts
                )
        self._published = View(blocks={name: array.copy() for name, array in blocks.items()})
        return msgspec.structs.replace(frame, number=self._number)


class FrameChain:
    """A reader's end: applies the published frames of one engine in order."""

    def __init__(self) -> None:
        self._number = 0
        self._view: View | None = None

    def take(self, payload: bytes) -> View | None:
        """The view after the frame in `payload`; None after a lost frame, until the next complete
        frame."""
        frame = msgspec.msgpack.decode(payload, type=Frame)
        follows = frame.number == self._number + 1
        self._number = frame.number
        if frame.block_ids is None and frame.status is not None:
            self._view = View.of(frame)
        elif self._view is not None:
            self._view = self._view.after(Change.of(frame)) if follows else None
        return self._view
