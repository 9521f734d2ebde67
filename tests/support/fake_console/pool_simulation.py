"""TEST ONLY: a small imitation of a paged KV pool with eviction, for the console to look at.

Not vToken's engine: no model, no attention, no claim about quality or speed. It keeps the
bookkeeping honest (live, dead, blocks, moves) so that what the console shows can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class SimRequest:
    id: str
    prompt: int
    limit: int
    block: list[int] = field(default_factory=list)  # a token's block, -1 when given back
    offset: list[int] = field(default_factory=list)
    live: list[bool] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    moved: int = 0
    number: int = 0
    evicted_ever: bool = False

    def live_count(self) -> int:
        return sum(self.live)


class Pool:
    """`num_blocks` blocks of `block_size` slots; block 0 is never used."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.rng = np.random.default_rng(seed)
        self.free = list(range(num_blocks - 1, 0, -1))
        # The free list of a pool in service is shuffled.
        self.rng.shuffle(self.free)
        self.requests: dict[str, SimRequest] = {}
        self.live = np.zeros(num_blocks, np.uint16)
        self.flags = np.zeros(num_blocks, np.uint8)
        self.owner = np.zeros(num_blocks, np.uint16)
        self.serial = 0
        self.shared: set[int] = set()
        self.hashed: set[int] = set()
        self.in_flight: set[int] = set()
        self.evicted = self.generated = self.moved_tokens = self.relocations = 0
        self.reclaimed = self.finished = 0

    def add(self, request_id: str, prompt: int, limit: int) -> bool:
        if -(-prompt // self.block_size) + 2 > len(self.free):
            return False
        self.serial += 1
        request = SimRequest(request_id, prompt, limit, number=self.serial)
        self.requests[request_id] = request
        for _ in range(prompt):
            self._append(request)
        for block in request.table[:2]:
            self.hashed.add(block)
        if self.rng.random() < 0.4 and request.table:
            self.shared.add(request.table[0])
        return True

    def _append(self, request: SimRequest) -> bool:
        used = len(request.table) and request.offset[-1] + 1 < self.block_size
        if not used or request.block[-1] != request.table[-1]:
            if not self.free:
                return False
            request.table.append(self.free.pop())
            offset = 0
        else:
            offset = request.offset[-1] + 1
        request.block.append(request.table[-1])
        request.offset.append(offset)
        request.live.append(True)
        return True

    def step(self, tokens: int) -> None:
        """Every request generates up to `tokens` tokens; the finished leave."""
        self.in_flight.clear()
        for request in list(self.requests.values()):
            for _ in range(tokens):
                if self._append(request):
                    self.generated += 1
            if len(request.live) - request.prompt >= request.limit:
                self.finish(request.id)

    def finish(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        self._release(request.table)
        self.finished += 1

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free.insert(0, block)
            self.shared.discard(block)
            self.hashed.discard(block)

    def evict(self, budget: int, interval: int, sinks: int = 4, recent: int = 32) -> int:
        """Random victims between the sinks and the recent window, down to the budget."""
        total = 0
        for request in self.requests.values():
            live = np.flatnonzero(request.live)
            if len(live) <= budget + interval:
                continue
            middle = live[sinks:-recent]
            weight = 1.0 + 3.0 * (middle % 97 < 60)
            count = min(len(live) - budget, len(middle))
            victims = self.rng.choice(middle, count, replace=False, p=weight / weight.sum())
            for token in victims.tolist():
                request.live[token] = False
            total += count
            self._drop_empty(request)
        self.evicted += total
        return total

    def _block_live(self, request: SimRequest) -> dict[int, list[int]]:
        by_block: dict[int, list[int]] = {block: [] for block in request.table}
        for token, alive in enumerate(request.live):
            if alive:
                by_block[request.block[token]].append(token)
        return by_block

    def _drop_empty(self, request: SimRequest) -> int:
        by_block = self._block_live(request)
        gone = [b for b in request.table[:-1] if not by_block[b]]
        if gone:
            request.table = [b for b in request.table if b not in gone]
            dead = set(gone)
            for token, block in enumerate(request.block):
                if block in dead:
                    request.block[token] = -1
            self._release(gone)
        return len(gone)

    def plan(self, request: SimRequest) -> tuple[int, int]:
        """(tokens to move, blocks to free) of one full plug round."""
        by_block = self._block_live(request)
        tail = request.table[-1]
        counts = sorted((len(t) for b, t in by_block.items() if b != tail), reverse=True)
        keep = -(-sum(counts) // self.block_size)
        return sum(counts[keep:]), len(counts) - keep

    def compact(self, request: SimRequest, batch: int) -> tuple[list[int], list[int], int]:
        """Moves live tokens into the holes of fuller blocks: (sources, destinations, tokens)."""
        by_block = self._block_live(request)
        tail = request.table[-1]
        order = sorted((b for b in request.table if b != tail), key=lambda b: -len(by_block[b]))
        keep = -(-sum(len(by_block[b]) for b in order) // self.block_size)
        sources = order[keep:][-batch:]
        holes = []
        for block in order[:keep]:
            taken = {request.offset[t] for t in by_block[block]}
            holes += [(block, o) for o in range(self.block_size) if o not in taken]
        moving = [t for b in sources for t in by_block[b]]
        used: set[int] = set()
        for token, (block, offset) in zip(moving, holes, strict=False):
            request.block[token], request.offset[token] = block, offset
            used.add(block)
        for token, alive in enumerate(request.live):
            if not alive and (request.block[token] in used or request.block[token] in sources):
                request.block[token] = -1
        freed = self._drop_empty(request)
        request.moved += len(moving)
        self.moved_tokens += len(moving)
        self.reclaimed += freed
        self.relocations += 1
        self.in_flight |= used
        return sources, sorted(used), len(moving)

    def refresh(self) -> None:
        """Recomputes `live`, `flags` and `owner` from the requests."""
        self.owner = np.zeros(self.num_blocks, np.uint16)
        self.live = np.zeros(self.num_blocks, np.uint16)
        self.flags = np.zeros(self.num_blocks, np.uint8)
        for request in self.requests.values():
            blocks = np.asarray(request.block)[np.asarray(request.live, bool)]
            np.add.at(self.live, blocks, 1)
            self.flags[request.table] |= 1
            self.owner[request.table] = request.number
            if request.table:
                self.flags[request.table[-1]] |= 16
        for blocks, bit in ((self.shared, 2), (self.hashed, 4), (self.in_flight, 8)):
            held = [b for b in blocks if self.flags[b]]
            self.flags[held] |= bit
