"""A relocation between its plan and the worker's report: what is told of it, what it counts for.

Knows neither tables nor the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.requests import Counters
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

    def count(self, counters: Counters) -> None:
        """The worker has executed it."""
        moved = self.relocation
        counters.relocations += 1
        counters.moved_tokens += moved.moved_tokens
        counters.reclaimed_blocks += moved.freed_blocks
        counters.relocation_freed_blocks += moved.freed_blocks
        counters.shared_copied_blocks += moved.shared_blocks
        counters.shared_copied_tokens += self.shared_tokens
        counters.shared_freed_blocks += self.shared_freed_blocks

    @property
    def summary(self) -> str:
        moved = self.relocation
        shared = f", out of {moved.shared_blocks} shared blocks" if moved.shared_blocks else ""
        return (
            f"moved {moved.moved_tokens} tokens of {moved.request_id}{shared}, "
            f"freed {moved.freed_blocks} blocks ({moved.planner}, {moved.reason})"
        )
