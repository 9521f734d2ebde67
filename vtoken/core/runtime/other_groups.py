"""The groups of layers beside the one with token tables: windows, chunks and states.

They take blocks of the same pool, and no policy evicts their tokens. A request holds a bounded
number of their blocks, more while a prompt is computed in chunks than later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vtoken.base.arrays import Ints
from vtoken.wire import GroupKind


class OtherGroup(Protocol):
    """One such group. `index`: its number among all groups; `block_bytes`: of all ranks."""

    index: int
    kind: GroupKind
    num_layers: int
    block_size: int
    block_bytes: int

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        """The most blocks that a request of at most `num_tokens` tokens holds while it computes
        at most `chunk_tokens` of them a step.
        """

    def growth(self, request_ids: Sequence[str], num_new: Ints, steps: int) -> Ints:
        """The blocks that running requests take [k] to compute `num_new` [k] tokens in `steps`
        steps, less those that they give back before; negative if they give back more.
        """

    def held_blocks(self, request_id: str) -> int:
        """The blocks that the request holds now."""

    def block_ids(self) -> list[int]:
        """The blocks that requests hold now, once for each holder."""


OtherGroups = Sequence[OtherGroup]
