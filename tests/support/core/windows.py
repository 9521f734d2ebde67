"""A group of layers with a window, beside the one with token tables, over the same plain pool."""

from __future__ import annotations

from tests.support.core.store import SimpleStore
from vtoken.wire import GroupKind


class Windows:
    """The core's `OtherGroup` of `window` tokens; a test decides what requests hold."""

    index = 1
    kind: GroupKind = "window"
    num_layers = 3
    block_bytes = 4096

    def __init__(self, store: SimpleStore, window: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._store, self._window = store, window
        self._held: dict[str, list[int]] = {}
        store.others.append(self)

    def hold(self, request_id: str, num_blocks: int) -> list[int]:
        """Take free blocks of the pool for a request."""
        taken = self._store.take(num_blocks)
        self._held.setdefault(request_id, []).extend(taken)
        return taken

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        return -(-min(num_tokens, self._window + chunk_tokens) // self.block_size)

    def held_blocks(self, request_id: str) -> int:
        return len(self._held.get(request_id, ()))

    def block_ids(self) -> list[int]:
        return [block for blocks in self._held.values() for block in blocks]
