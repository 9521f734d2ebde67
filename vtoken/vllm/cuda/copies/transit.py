"""Memory of the device that tokens pass on their way to the host and back.

A ring of rows, each of one token in all layers. It has a bounded size, because the device's memory
is vLLM's. The rows of one use are filled by one stream and emptied by another:

    to the host     relocation fills them, park empties them
    to the device   park fills them, relocation empties them

1. rows are filled only after their last use: the filling stream waits for its end, which the
   emptying stream recorded. Uses take rows in the ring's order, so uses that overlap a new one are
   the oldest
2. what fits the ring waits for nothing: only a step that needs more waits for the bus
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vtoken.vllm.cuda.copies.streams import Stream, Streams

MAX_BYTES = 128 << 20  # of the ring; a row of Llama-3.1-8B in bfloat16 has 128 KiB


class Use(NamedTuple):
    """Rows from number `first` on, and the event of the use's end; numbers count all uses."""

    first: int
    ended: Any


class Transit:
    """The ring, with rows [L, row] of slots of `layers`, one [N * S, row] each.

    It takes its memory at the first use, and no more than for all slots twice.
    """

    def __init__(self, layers: Sequence[torch.Tensor], streams: Streams) -> None:
        self._like, self._num_layers = layers[0], len(layers)
        slots, row = self._like.shape
        row_bytes = len(layers) * row * self._like.element_size()
        self._num_rows = max(2, min(2 * slots, MAX_BYTES // row_bytes))
        self.max_rows = self._num_rows // 2  # of one use, so that two streams work at once
        self._streams = streams
        self._rows: torch.Tensor | None = None
        self._next = 0  # number of the next row; the rows in memory repeat
        self._uses: deque[Use] = deque()

    def make(self) -> None:
        """Take the memory, if that is still to be done. Raises what torch raises."""
        if self._rows is None:
            # Its memory may have been the relocation stream's until now, and is in that order.
            self._streams.launch(Stream.RELOCATION, self._allocate)

    def _allocate(self) -> None:
        shape = (self._num_rows, self._num_layers, self._like.shape[1])
        self._rows = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)

    def take(self, count: int, filling: Stream) -> torch.Tensor:
        """The next `count` rows, at most `max_rows`; `filling` waits for their last use.

        Ends with `ended`, before the next call.
        """
        assert self._rows is not None
        at = self._next % self._num_rows
        if at + count > self._num_rows:  # rows of one use are contiguous
            self._next, at = self._next + self._num_rows - at, 0
        self._first, self._next = self._next, self._next + count
        while self._uses and self._uses[0].first < self._next - self._num_rows:
            self._streams.wait(filling, self._uses.popleft().ended)
        return self._rows[at : at + count]

    def ended(self, emptying: Stream) -> None:
        """What reads the rows of the last `take` is launched on `emptying`."""
        self._uses.append(Use(self._first, self._streams.record(emptying)))
