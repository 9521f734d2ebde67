"""A relocation between its plan and the worker's report: what is told of it, what it counts for.

Knows neither tables nor the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.planning.planner import RelocationPlan
from vtoken.runtime.events import counted
from vtoken.runtime.requests import Counters
from vtoken.wire import Relocation


@dataclass(slots=True)
class InFlight:
    """A relocation whose copy has been, or will be, handed to the worker.

    `shared_tokens`: tokens that leave shared blocks; `shared_freed_blocks`: shared blocks whose
    last holder this request was.
    """

    relocation: Relocation
    operation_id: str | None
    shared_tokens: int = 0
    shared_freed_blocks: int = 0

    @classmethod
    def of(
        cls,
        plan: RelocationPlan,
        destinations: list[int],
        *,
        bytes_per_token: int,
        block_size: int,
        holders: npt.NDArray[np.uint16],
        plan_us: int,
        operation_id: str | None,
    ) -> InFlight:
        """The tables have followed `plan` into the blocks `destinations`; `holders` [N] since."""
        relocation = Relocation(
            request_id=plan.request_id,
            moved_tokens=plan.num_moved_tokens,
            moved_bytes=plan.num_moved_tokens * bytes_per_token,
            source_blocks=plan.source_blocks.tolist(),
            destination_blocks=destinations,
            freed_blocks=plan.num_freed_blocks,
            reason="manual" if operation_id else "auto",
            planner=plan.planner,
            plan_us=plan_us,
            shared_blocks=len(plan.shared_blocks),
            retaken_blocks=plan.retaken_blocks,
        )
        moving = cls(relocation, operation_id)
        if plan.shared_blocks:
            left = np.isin(plan.source_slots // block_size, plan.shared_blocks)
            moving.shared_tokens = int(np.count_nonzero(left))
            moving.shared_freed_blocks = sum(int(holders[b] == 0) for b in plan.shared_blocks)
        return moving

    def count(self, counters: Counters) -> None:
        """The worker has executed it."""
        moved = self.relocation
        counters.relocations += 1
        counters.moved_tokens += moved.moved_tokens
        counters.reclaimed_blocks += moved.freed_blocks - moved.retaken_blocks
        counters.relocation_freed_blocks += moved.freed_blocks - moved.retaken_blocks
        counters.shared_copied_blocks += moved.shared_blocks
        counters.shared_copied_tokens += self.shared_tokens
        counters.shared_freed_blocks += self.shared_freed_blocks

    @property
    def blocks(self) -> list[int]:
        """Those that are read or written."""
        return [*self.relocation.source_blocks, *self.relocation.destination_blocks]

    @property
    def summary(self) -> str:
        moved = self.relocation
        shared = ""
        if moved.shared_blocks:
            shared = f", out of {counted(moved.shared_blocks, 'shared block')}"
        return (
            f"moved {counted(moved.moved_tokens, 'token')} of {moved.request_id}{shared}, "
            f"freed {counted(moved.freed_blocks, 'block')} ({moved.planner}, {moved.reason})"
        )
