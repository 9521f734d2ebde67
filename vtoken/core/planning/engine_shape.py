"""The sizes of an engine's blocks, steps and drafts, which never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from vtoken.base.arrays import Ints
from vtoken.wire import MAX_TOKENS, Geometry

N = TypeVar("N", int, Ints)


@dataclass(slots=True)
class EngineShape:
    """The shape of one engine.

    `report_lag_steps`: how many steps the worker may be behind while the next one is planned.
    `max_drafts`: the most drafts of a request in a step, beside its newest token. `lookahead`: how
    many places behind a step's tokens the engine takes for those that a drafter's layers compute.
    `max_chunk_tokens`, `max_step_tokens`: the longest chunk of a prompt, and the most tokens that
    the engine computes in one step. `borrows_blocks`: the worker packs holes before attention.
    """

    geometry: Geometry
    report_lag_steps: int = 0
    max_drafts: int = 0
    lookahead: int = 0
    max_chunk_tokens: int = MAX_TOKENS
    max_step_tokens: int = MAX_TOKENS
    borrows_blocks: bool = True

    @property
    def block_size(self) -> int:
        return self.geometry.block_size

    @property
    def next_places(self) -> int:
        """The most places that the next step of a decoding request takes."""
        return 1 + self.max_drafts + self.lookahead

    def blocks_of(self, num_tokens: N) -> N:
        """Blocks for `num_tokens` tokens in consecutive places."""
        return -(-num_tokens // self.block_size)

    def needed_blocks(self, num_live: N) -> N:
        """Blocks for `num_live` tokens and the places of the next step.

        A request that holds no more gains nothing by a relocation, or loses the block that its next
        tokens take.
        """
        return self.blocks_of(num_live + self.next_places)
