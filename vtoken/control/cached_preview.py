"""The round that the planner previewed last, and a lower bound of what it would still gain.

Reads the runtime and changes nothing. `vtoken.control.diagnosis` decides when to plan anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.core.planning.planner import RelocationPlan
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_table import TokenTable


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The planned relocation of one table; `num_tokens`, `num_blocks`: the table's at that time."""

    table: TokenTable
    plan: RelocationPlan
    num_tokens: int
    num_blocks: int

    @property
    def is_shared(self) -> bool:
        """Whether the plan is one of a group that empties shared blocks."""
        return bool(self.plan.shared_blocks)

    def extra_fresh_blocks(self) -> int:
        """Upper bound of the fresh blocks needed on top: tokens appended since the plan have taken
        slots that it meant to fill."""
        return -(-(self.table.num_tokens - self.num_tokens) // self.table.block_size)

    def freed_blocks_now(self) -> int:
        """Lower bound of the blocks that moving this request still frees, if it has excess blocks.

        Blocks that the table has given back since the plan are free already and do not count.
        """
        table = self.table
        left = max(0, self.num_blocks - table.num_blocks)
        spare = table.num_blocks - -(-table.num_live // table.block_size)
        return min(self.plan.num_freed_blocks - self.extra_fresh_blocks() - left, spare)


@dataclass(frozen=True, slots=True)
class Gain:
    """Lower bounds of what a round frees and moves; `likely`: it probably frees something."""

    likely: bool
    freed_blocks: int = 0
    moved_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CachedPreview:
    """The round that the planner last previewed.

    `missing_blocks`: fresh blocks that the round lacked, beyond `available_blocks`, to free more.
    `held_shared_blocks`: shared blocks with holes that `prefix_sharing` keeps in place.
    `copy_freed_blocks`: how many blocks moving those too would free; computed only where the round
    has no plan. `better_sharing`: the tier that frees them, `index` where all of them are dead.
    """

    plans: tuple[TablePlan, ...] = ()
    available_blocks: int = 0
    missing_blocks: int = 0
    held_shared_blocks: int = 0
    copy_freed_blocks: int = 0
    better_sharing: str = "copy"

    def gain(self, runtime: Runtime) -> Gain:
        """What a round would still gain now."""
        current, in_flight_step = runtime.tables.get, runtime.state.in_flight_step
        plans = [
            planned
            for planned in self.plans
            if current(planned.table.request_id) is planned.table
            and not in_flight_step(planned.table.request_id)
        ]
        complete = len(plans) == len(self.plans)
        headroom = runtime.round_planner.headroom(runtime.config)
        freed = moved = 0
        likely = False
        for planned in plans:
            plan, is_shared = planned.plan, planned.is_shared
            if is_shared and not complete:
                continue
            has_excess = runtime.round_planner.has_excess(planned.table)
            likely = likely or is_shared or has_excess
            headroom -= plan.num_fresh_blocks + planned.extra_fresh_blocks()
            gain = planned.freed_blocks_now() if has_excess else 0
            if is_shared:
                gain = plan.num_freed_blocks
            if headroom >= 0 and (gain > 0 or is_shared):
                freed += gain
                moved += plan.num_moved_tokens
        return Gain(likely, freed, moved) if freed > 0 else Gain(likely)
