"""The worker's mirror of one token table: the slot of every live token, and its signals.

Fed only by step plans; knows neither the scheduler's tables nor torch. Every plan's absolute counts
are verified, so a mirror that loses count stops the worker before the forward. Right counts in
wrong places are found by the content check alone (`verify_ratio`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vtoken.arrays import Ints
from vtoken.errors import MirrorMismatchError
from vtoken.policies.signals import Keeper, Signal, make_keeper
from vtoken.protocol.step import RequestStep

MakeKeeper = Callable[[Signal, tuple[int, ...]], Keeper[Any]]


class Mirror:
    """`slots` [T]: slot of each token id, -1 for dead ones. `keepers`: its attention signals."""

    def __init__(self, slots: Ints) -> None:
        self._slots = slots
        self.keepers: dict[Signal, Keeper[Any]] = {}
        self._kept: tuple[Sequence[Signal], tuple[int, ...]] = (), ()
        self.num_tokens = len(slots)

    @classmethod
    def positional(cls, block_ids: Sequence[int], num_tokens: int, block_size: int) -> Mirror:
        """The mirror of a request whose layout is still vLLM's: token i at block i // S."""
        blocks = np.asarray(block_ids, dtype=np.int64)
        ids = np.arange(num_tokens, dtype=np.int64)
        return cls(blocks[ids // block_size] * block_size + ids % block_size)

    def apply(self, step: RequestStep) -> None:
        """Evict, move, append; raises MirrorMismatchError when the counts then disagree."""
        if step.num_tokens != self.num_tokens:
            raise MirrorMismatchError(
                f"the plan is for {step.num_tokens} tokens, the mirror has {self.num_tokens}"
            )
        self._slots[step.evicted] = -1
        self._slots[step.moved_ids] = step.moved_slots
        self.append(step.new_slots)
        num_live = int(np.count_nonzero(self._slots[: self.num_tokens] >= 0))
        if num_live != step.num_live:
            raise MirrorMismatchError(
                f"the plan counts {step.num_live} live tokens, the mirror {num_live}"
            )

    def append(self, slots: Ints) -> None:
        """The next tokens are written to `slots` [k]."""
        end = self.num_tokens + len(slots)
        if end > len(self._slots):
            grown = np.full(max(end, 2 * len(self._slots)), -1, dtype=np.int64)
            grown[: self.num_tokens] = self._slots[: self.num_tokens]
            self._slots = grown
        self._slots[self.num_tokens : end] = slots
        self.num_tokens = end

    def live(self) -> tuple[Ints, Ints]:
        """Ids [n] of the live tokens, ascending, and their slots [n]."""
        slots = self._slots[: self.num_tokens]
        ids = np.flatnonzero(slots >= 0)
        return ids, slots[ids]

    def newest(self, num_tokens: int) -> Ints:
        """The slots of the newest `num_tokens` tokens."""
        return self._slots[self.num_tokens - num_tokens : self.num_tokens]

    def keep(
        self, signals: Sequence[Signal], layers: tuple[int, ...], make: MakeKeeper = make_keeper
    ) -> None:
        """Keep `signals` of `layers` from now on: those that were kept go on, others start anew."""
        if (signals, layers) == self._kept:
            return
        self._kept = signals, layers
        before, self.keepers = self.keepers, {}
        for signal in signals:
            if signal.source == "attention":
                keeper = before.get(signal)
                if keeper is None or keeper.layers != layers:
                    keeper = make(signal, layers)
                self.keepers[signal] = keeper
