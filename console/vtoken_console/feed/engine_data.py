"""The data of one row of the fleet page: an engine's newest state, and its rate of tokens.

There may be many rows with large pools, so block arrays are written in place: new ones with every
message would scatter the heap. What no row shows is left out: who owns a block, the history of the
charts. Invariant: each array in `blocks` has as many blocks as the newest `hello` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken import wire
from vtoken.wire.engine_state import Difference
from vtoken.wire.reducer import ResyncNeeded, StreamState, apply
from vtoken_console.feed.series import Rate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEPT = ("live", "flags")


class EngineData:
    """`model` has no blocks; they are in `blocks`. `version` rises with every new state."""

    def __init__(self) -> None:
        self.model = StreamState()
        self.blocks: dict[str, npt.NDArray[np.integer]] = {}
        self.tokens_per_s = 0.0
        self.version = 0
        self._rate = Rate()

    def apply(self, message: wire.StreamMessage) -> None:
        """Applies a message; raises ResyncNeeded."""
        difference: Difference | None = None
        if isinstance(message, wire.Snapshot):
            difference = Difference.of(message)
            message.live = message.flags = message.owner = None
            message.history = []
        elif isinstance(message, wire.Delta):
            difference = Difference.of(message)
            message.block_ids = message.block_live = message.block_flags = None
            message.block_owner = None
        before = self.model
        self.model = apply(before, message)
        if difference is None:
            return
        self._write(difference)
        self.version += 1
        status = self.model.status
        if status is not None and status is not before.status:
            self.tokens_per_s = self._rate.add(status.ts, status.tokens.generated)

    def _write(self, difference: Difference) -> None:
        hello = self.model.hello
        assert hello is not None  # a state follows it
        if difference.block_ids is None:
            self.blocks = {n: difference.blocks[n].copy() for n in KEPT if n in difference.blocks}
            sizes = {len(array) for array in self.blocks.values()}
            if sizes - {hello.geometry.num_blocks}:
                raise ResyncNeeded(f"a snapshot of {sizes} blocks")
            return
        try:
            difference.write(self.blocks)
        except (ValueError, IndexError) as error:
            raise ResyncNeeded(f"delta: {error}") from error
