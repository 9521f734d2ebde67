"""The query heads of a signal that one tensor-parallel rank holds.

vLLM gives every rank equally many query heads, in order. If there are fewer KV heads than ranks,
several ranks hold a copy of the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.policies.signals import Signal


@dataclass(frozen=True, slots=True)
class RankHeads:
    """The heads of rank `rank` of `num_ranks`."""

    rank: int = 0
    num_ranks: int = 1

    def own(self, signal: Signal, num_heads: int) -> list[int] | None:
        """The heads of `signal` on this rank, numbered from 0 to `num_heads`; None: all of them."""
        if not signal.heads:
            return None
        first = self.rank * num_heads
        return [head - first for head in signal.heads if first <= head < first + num_heads]

    def total(self, signal: Signal, num_heads: int) -> int:
        """The number of heads that `signal` uses, over all ranks of `num_heads` each."""
        return len(signal.heads) or self.num_ranks * num_heads
