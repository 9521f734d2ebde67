"""The published frames of one engine: numbered, each cut down to what changed since the one before.

Knows the wire and numpy, neither sockets nor who made the frame. N blocks; what is compared is the
frames' own arrays, so no part of the engine has to tell what it changes. Invariants:
1. numbers rise by one
2. a frame is whole if it has no `block_ids`, and figures (status, rows, configuration)
3. else frame n lacks what is still as in frame n - 1: with `block_ids`, every other block; without
   figures, those that are shown, which are of the newest frame that has some
So whoever has frame n - 1 makes frame n of it, and whoever has not waits for a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.arrays import Ints
from vtoken.wire import BLOCK_ARRAYS, Frame

MAX_CHANGED = 5 / 9  # of all blocks: a changed block takes 4 bytes more than one of a whole frame

Arrays = list[npt.NDArray[Any]]


class FrameSequence:
    """What was published last."""

    def __init__(self) -> None:
        self._number = 0
        self._told: Arrays = []

    def next(self, frame: Frame, *, whole: bool) -> Frame:
        """`frame`, whose arrays are of all blocks, as it is published; `whole`: uncut."""
        arrays = block_arrays(frame)
        ids = None if whole or not self._told else _changed(self._told, arrays)
        self._number += 1
        if ids is None:
            self._told = [array.copy() for array in arrays]
            return msgspec.structs.replace(frame, number=self._number)
        parts = [array[ids] for array in arrays]
        for told, part in zip(self._told, parts, strict=True):
            told[ids] = part
        named = zip(BLOCK_ARRAYS, parts, strict=True)
        return msgspec.structs.replace(
            frame,
            number=self._number,
            block_ids=ids.astype("<u4").data,
            **{name: part.data for (name, _), part in named},
        )


def block_arrays(frame: Frame) -> Arrays:
    """The arrays of a frame, in the order of `BLOCK_ARRAYS`; views of its bytes."""
    return [np.frombuffer(getattr(frame, name), dtype) for name, dtype in BLOCK_ARRAYS]


def _changed(told: Sequence[npt.NDArray[Any]], arrays: Arrays) -> Ints | None:
    """Ids of the blocks [k] that differ, ascending; None where a whole frame is smaller."""
    changed = told[0] != arrays[0]
    for before, now in zip(told[1:], arrays[1:], strict=True):
        changed |= before != now
    ids = np.flatnonzero(changed)
    return None if len(ids) > MAX_CHANGED * len(changed) else ids
