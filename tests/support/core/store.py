"""A block pool in plain Python, with the rules of vLLM's `BlockPool`: reference counts, prefix
hashes, a free list that allocates unhashed blocks first and evicts cached ones last.

Independent of tokens and vToken. Block 0 is the null block: never free, never allocated.

1. ref_cnt[b] = how many block tables hold b,  b is free <=> ref_cnt[b] = 0
2. hash[b] = h  <=>  b in cached[h]; a block loses its hash only when it is allocated again
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from vtoken.core.runtime.other_groups import OtherGroup
from vtoken.core.tables.token_table import TokenTable


class SimpleStore:
    """`vtoken.core.runtime.runtime.BlockStore` over lists; `hashed` [N] is updated in place."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_cnt = [0] * num_blocks
        self.hash: list[Hashable | None] = [None] * num_blocks
        self.hashed = np.zeros(num_blocks, dtype=np.bool_)
        self.free: deque[int] = deque(range(1, num_blocks))
        self.cached: dict[Hashable, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.others: list[OtherGroup] = []  # which take blocks too

    # ------------------------------------------------------------ BlockStore

    def num_free_blocks(self) -> int:
        return len(self.free)

    def is_writable(self, block: int) -> bool:
        return block != 0 and self.ref_cnt[block] == 1 and self.hash[block] is None

    def first_not_writable(self, blocks: Sequence[int]) -> int | None:
        return next((block for block in blocks if not self.is_writable(block)), None)

    def is_shared(self, block: int) -> bool:
        return self.ref_cnt[block] > 1

    def take(self, num_blocks: int) -> list[int]:
        if num_blocks > len(self.free):
            raise ValueError(f"cannot take {num_blocks} of {len(self.free)} free blocks")
        blocks = [self.free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._forget_hash(block)
            self.ref_cnt[block] = 1
        return blocks

    def borrow(self, num_blocks: int) -> list[int]:
        return [block for block in self.free if self.hash[block] is None][:num_blocks]

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        self.tables[request_id] = list(blocks)

    def remove(self, request_id: str, runs: Sequence[tuple[int, int]]) -> None:
        for start, end in reversed(runs):
            del self.tables[request_id][start:end]

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        held: Counter[int] = Counter()
        wrong = []
        for table in tables:
            held.update(table.blocks)
            if table.blocks != self.tables[table.request_id]:
                wrong.append(f"the block table of {table.request_id} differs")
        for group in self.others:
            held.update(group.block_ids())
        if [held[b] for b in range(self.num_blocks)] != self.ref_cnt:
            wrong.append("reference counts differ")
        if len(self.free) + len(held) != self.num_blocks - 1:
            wrong.append(f"{len(self.free)} blocks are free and {len(held)} held")
        return wrong

    def blocks_from(self, request_id: str, first: int) -> Sequence[int]:
        return self.tables[request_id][first:]

    def give_back(self, blocks: Sequence[int]) -> None:
        first: list[int] = []
        last: list[int] = []
        for block in blocks:
            if self.ref_cnt[block] <= 0:
                raise ValueError(f"block {block} is freed but has no holder")
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                (first if self.hash[block] is None else last).append(block)
        self.free.extendleft(reversed(first))
        self.free.extend(last)

    # ------------------------------------------------------------ the engine's side

    def admit(self, request_id: str, hit: Sequence[int]) -> None:
        """Create a block table that starts with the cached blocks `hit`."""
        for block in hit:
            if self.ref_cnt[block] == 0:
                self.free.remove(block)
            self.ref_cnt[block] += 1
        self.tables[request_id] = list(hit)

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        new = self.take(num_blocks)
        self.tables[request_id] += new
        return new

    def longest_hit(self, hashes: Sequence[Hashable]) -> list[int]:
        """Cached blocks of the longest prefix of `hashes`."""
        hit: list[int] = []
        for key in hashes:
            if not self.cached.get(key):
                break
            hit.append(self.cached[key][0])
        return hit

    def cache(self, block: int, key: Hashable) -> None:
        """Hash the full block `block`, whose contents are `key`."""
        if self.hash[block] is None:
            self.hash[block] = key
            self.hashed[block] = True
            self.cached.setdefault(key, []).append(block)

    def release(self, request_id: str) -> None:
        self.give_back(self.tables.pop(request_id)[::-1])

    def _forget_hash(self, block: int) -> None:
        key = self.hash[block]
        if key is not None:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
            self.hash[block] = None
            self.hashed[block] = False

    def check(self) -> None:
        held = Counter(block for table in self.tables.values() for block in table)
        held.update(block for group in self.others for block in group.block_ids())
        assert [held[b] for b in range(self.num_blocks)] == self.ref_cnt
        assert sorted(self.free) == [b for b in range(1, self.num_blocks) if held[b] == 0]
        assert all(self.hash[b] == key for key, bs in self.cached.items() for b in bs)
