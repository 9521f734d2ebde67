"""How many blocks a request would hold if tokens never moved and slots were never reused.

That is the number of positional blocks with a live token: the naive-evict baseline of the same
decisions. Counted once, then followed through appended tokens and small evictions.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vtoken.arrays import Bools, Ints

FEW = 8  # victims up to which following is cheaper than counting anew


@cache
def _block_of(num_bytes: int) -> np.dtype[np.void]:
    """A block as one element, which numpy counts where any byte of it is not 0."""
    return np.dtype((np.void, num_bytes))


class NaiveBlocks:
    """`live` [T..] by token id, of which `num_tokens` exist."""

    def __init__(self, live: Bools, num_tokens: int, block_size: int) -> None:
        self._block_size = block_size
        whole = num_tokens - num_tokens % block_size
        full = np.count_nonzero(live[:whole].view(_block_of(block_size)))
        self._tail_alive = bool(np.count_nonzero(live[whole:num_tokens]))
        self._count = int(full) + self._tail_alive
        self._num_tokens = num_tokens

    def count(self, num_tokens: int) -> int:
        """The blocks when `num_tokens` exist; those that were appended meanwhile all live."""
        if num_tokens > self._num_tokens:
            first = self._num_tokens // self._block_size + self._tail_alive
            self._count += max(0, (num_tokens - 1) // self._block_size - first + 1)
            self._tail_alive = num_tokens % self._block_size != 0
            self._num_tokens = num_tokens
        return self._count

    def follow(self, victims: Ints, live: Bools, num_tokens: int) -> bool:
        """The `victims` [v] have just died in `live`; False when counting anew is cheaper."""
        if len(victims) > FEW:
            return False
        self.count(num_tokens)
        s = self._block_size
        for rank in set((victims // s).tolist()):
            if not live[rank * s : min((rank + 1) * s, num_tokens)].any():
                self._count -= 1
                if rank == num_tokens // s:
                    self._tail_alive = False
        return True
