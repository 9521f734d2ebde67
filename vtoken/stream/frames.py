"""The published frames of one engine: numbered, each reduced to the changes since the last one.

Independent of sockets and of the frame's source. Changes are found by comparing the frames' own
arrays of N blocks, so the engine does not track them. Invariants:
1. numbers increase by one
2. a frame is complete if it has no `block_ids` and has a status (with rows and configuration)
3. any other frame n omits what equals frame n - 1: with `block_ids`, all other blocks; without
   a status, the status, which stays that of the newest frame that has one
A reader that has frame n - 1 can apply frame n; any other reader waits for a complete frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.arrays import Ints
from vtoken.wire import BLOCK_ARRAYS, Frame

# Share of all blocks: a changed block needs 4 more bytes, its id, than in a complete frame.
MAX_CHANGED = 5 / 9

Arrays = list[npt.NDArray[Any]]


class FrameSequence:
    """Numbers frames and reduces each to its changes."""

    def __init__(self) -> None:
        self._number = 0
        self._published: Arrays = []

    def next(self, frame: Frame, *, whole: bool) -> Frame:
        """The frame to publish, from `frame` with all blocks; `whole`: do not reduce it."""
        arrays = block_arrays(frame)
        ids = None if whole or not self._published else _changed(self._published, arrays)
        self._number += 1
        if ids is None:
            self._published = [array.copy() for array in arrays]
            return msgspec.structs.replace(frame, number=self._number)
        parts = [array[ids] for array in arrays]
        for array, part in zip(self._published, parts, strict=True):
            array[ids] = part
        named = zip(BLOCK_ARRAYS, parts, strict=True)
        return msgspec.structs.replace(
            frame,
            number=self._number,
            block_ids=ids.astype("<u4").data,
            **{name: part.data for (name, _), part in named},
        )


def block_arrays(frame: Frame) -> Arrays:
    """Views of a frame's arrays, in the order of `BLOCK_ARRAYS`."""
    return [np.frombuffer(getattr(frame, name), dtype) for name, dtype in BLOCK_ARRAYS]


def _changed(before: Sequence[npt.NDArray[Any]], now: Arrays) -> Ints | None:
    """Ids of the blocks [k] that differ, ascending; None if a complete frame is smaller."""
    changed = before[0] != now[0]
    for old, new in zip(before[1:], now[1:], strict=True):
        changed |= old != new
    ids = np.flatnonzero(changed)
    return None if len(ids) > MAX_CHANGED * len(changed) else ids
