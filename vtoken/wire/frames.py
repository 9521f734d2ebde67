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

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints
from vtoken.wire import BLOCK_ARRAYS, Frame

# Share of all blocks: a changed block needs 4 more bytes, its id, than in a complete frame.
MAX_CHANGED = 5 / 9

Arrays = Mapping[str, npt.NDArray[Any]]  # by the names of `BLOCK_ARRAYS`


class FrameSequence:
    """Numbers frames and reduces each to its changes."""

    def __init__(self) -> None:
        self._number = 0
        self._published: Arrays = {}

    def next(self, frame: Frame, *, whole: bool) -> Frame:
        """The frame to publish, from `frame` with all blocks; `whole`: do not reduce it."""
        arrays = block_arrays(frame)
        ids = None if whole or not self._published else changed_blocks(self._published, arrays)
        self._number += 1
        if ids is None or len(ids) > MAX_CHANGED * len(arrays["live"]):
            self._published = {name: array.copy() for name, array in arrays.items()}
            return msgspec.structs.replace(frame, number=self._number)
        parts = {name: array[ids] for name, array in arrays.items()}
        for name, part in parts.items():
            self._published[name][ids] = part
        return msgspec.structs.replace(
            frame,
            number=self._number,
            block_ids=ids.astype("<u4").data,
            **{name: part.data for name, part in parts.items()},
        )


def block_arrays(frame: Frame) -> Arrays:
    """Views of the arrays that a frame has; an engine that does not report one sends it empty."""
    views = {name: np.frombuffer(getattr(frame, name), dtype) for name, dtype in BLOCK_ARRAYS}
    return {name: array for name, array in views.items() if array.size}


def changed_blocks(before: Arrays, now: Arrays) -> Ints:
    """Ids of the blocks [k] that differ in an array, ascending."""
    changed = np.zeros(len(now["live"]), dtype=bool)
    for name, array in now.items():
        changed |= before[name] != array
    return np.flatnonzero(changed)
