"""A relocation between its plan and the worker's report: its event and its counters.

Independent of tables and of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.base.request_ids import short_id
from vtoken.core.planning.planner import RelocationPlan
from vtoken.sentences import counted
from vtoken.wire import Geometry, ReclamationCounters, Relocation


@dataclass(slots=True)
class InFlight:
    """A relocation whose copies are, or will be, in a plan for the worker.

    `shared_tokens`: tokens moved out of shared blocks; `shared_freed_blocks`: shared blocks of
    which this request was the last holder.
    """

    plan: RelocationPlan  # with its fresh blocks
    relocation: Relocation
    operation_id: str | None
    shared_tokens: int = 0
    shared_freed_blocks: int = 0

    @classmethod
    def of(
        cls,
        plan: RelocationPlan,
        bound: RelocationPlan,
        destinations: list[int],
        geometry: Geometry,
        *,
        holders: npt.NDArray[np.uint16],
        plan_us: int,
        operation_id: str | None,
    ) -> InFlight:
        """Describe `plan` after the tables applied it, `bound` to its fresh blocks; `holders` [N]
        are those afterwards.
        """
        relocation = Relocation(
            request_id=plan.request_id,
            moved_tokens=plan.num_moved_tokens,
            moved_bytes=plan.num_moved_tokens * geometry.bytes_per_token,
            source_blocks=plan.source_blocks.tolist(),
            destination_blocks=destinations,
            freed_blocks=plan.num_freed_blocks,
            reason="manual" if operation_id else "auto",
            planner=plan.planner,
            plan_us=plan_us,
            shared_blocks=len(plan.shared_blocks),
            retaken_blocks=plan.retaken_blocks,
        )
        moving = cls(bound, relocation, operation_id)
        if plan.shared_blocks:
            from_shared = np.isin(plan.source_slots // geometry.block_size, plan.shared_blocks)
            moving.shared_tokens = int(np.count_nonzero(from_shared))
            moving.shared_freed_blocks = sum(int(holders[b] == 0) for b in plan.shared_blocks)
        return moving

    def count(self, counters: ReclamationCounters) -> None:
        """Add the relocation to `counters` once the worker has executed it."""
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
        """The blocks that the copies read or write."""
        return [*self.relocation.source_blocks, *self.relocation.destination_blocks]

    @property
    def summary(self) -> str:
        moved = self.relocation
        shared = ""
        if moved.shared_blocks:
            shared = f", out of {counted(moved.shared_blocks, 'shared block')}"
        tokens = f"{counted(moved.moved_tokens, 'token')} of {short_id(moved.request_id)}"
        return f"moved {tokens}{shared}, freed {counted(moved.freed_blocks, 'block')}"
