"""A group of layers with a window, beside the one with token tables, over the same plain pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.core.store import SimpleStore
from vtoken.base.arrays import Ints
from vtoken.wire import GroupKind


class Windows:
    """The core's `OtherGroup` of `window` tokens. `advance` moves a request's window as vLLM does;
    with `hold`, a test decides what a request holds.
    """

    index = 1
    kind: GroupKind = "window"
    num_layers = 3
    block_bytes = 4096

    def __init__(self, store: SimpleStore, window: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._store, self._window = store, window
        self._held: dict[str, list[int]] = {}
        self._num_left: dict[str, int] = {}  # blocks that have left the window
        self._computed: dict[str, int] = {}
        store.others.append(self)

    def hold(self, request_id: str, num_blocks: int) -> list[int]:
        """Take free blocks of the pool for a request."""
        taken = self._store.take(num_blocks)
        self._held.setdefault(request_id, []).extend(taken)
        return taken

    def give_back(self, request_id: str, num_computed: int) -> None:
        """Return the blocks that no token after `num_computed` reads."""
        held, left = self._held.setdefault(request_id, []), self._left(num_computed)
        num_left = self._num_left.get(request_id, 0)
        count = min(len(held), max(0, left - num_left))
        self._num_left[request_id] = max(num_left, left)
        self._store.give_back(held[:count])
        del held[:count]

    def missing(self, request_id: str, num_tokens: int) -> int:
        """The blocks that a request of `num_tokens` tokens lacks."""
        end = self._num_left.get(request_id, 0) + self.held_blocks(request_id)
        return max(0, -(-num_tokens // self.block_size) - end)

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Take what it lacks; its first `num_tokens` tokens are then computed."""
        self.hold(request_id, self.missing(request_id, num_tokens))
        self._computed[request_id] = num_tokens

    def release(self, request_id: str) -> None:
        self._store.give_back(self._held.pop(request_id, []))
        self._num_left.pop(request_id, None)

    def _left(self, num_computed: int) -> int:
        return max(0, num_computed - self._window + 1) // self.block_size

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        return -(-min(num_tokens, self._window + chunk_tokens) // self.block_size)

    def growth(self, request_ids: Sequence[str], num_new: Ints, steps: int) -> Ints:
        found = []
        for name, count in zip(request_ids, num_new.tolist(), strict=True):
            computed = self._computed.get(name, 0)
            left = self._left(computed + steps - 1) - self._num_left.get(name, 0)
            gone = min(max(0, left), self.held_blocks(name))
            found.append(self.missing(name, computed + count) - gone)
        return np.array(found, dtype=np.int64)

    def held_blocks(self, request_id: str) -> int:
        return len(self._held.get(request_id, ()))

    def block_ids(self) -> list[int]:
        return [block for blocks in self._held.values() for block in blocks]
