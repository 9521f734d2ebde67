"""One planning round (paper 3.3): plans for all requests together, within B and the headroom.

Pure functions from layouts to plans, independent of tables and vLLM. `vtoken.core.planning.gates`
decides when a round runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.planner import Layout, RelocationPlan, search
from vtoken.core.planning.sharing import plan_groups


@dataclass(frozen=True, slots=True)
class Round:
    """The plans of one round. `missing_blocks`: fresh blocks lacking for further plans.

    `shared_skipped_blocks`: shared blocks with a hole that were passed over, counted per holder.
    """

    plans: tuple[RelocationPlan, ...]
    missing_blocks: int
    shared_skipped_blocks: int = 0

    @property
    def num_freed_blocks(self) -> int:
        return sum(plan.num_freed_blocks for plan in self.plans)

    @property
    def num_moved_tokens(self) -> int:
        return sum(plan.num_moved_tokens for plan in self.plans)


def plan_round(
    layouts: Iterable[Layout],
    config: VTokenConfig,
    *,
    holders: npt.NDArray[np.uint16],
    batch_size: int,
    headroom_blocks: int,
) -> Round:
    """Plan request by request, in order, within a total of B sources and the headroom.

    `layouts` is ordered most wasteful first and consumed lazily until B is used up. Individual
    plans come first, because they move fewest tokens per block; under `copy`, groups over shared
    blocks then use what remains of B and the headroom. `holders` [N]: requests holding each block.
    """
    plans: list[RelocationPlan] = []
    seen: list[tuple[Layout, RelocationPlan | None]] = []
    missing = num_candidates = 0
    sources_left, headroom_left = batch_size, headroom_blocks
    for layout in layouts:
        found = search(
            layout,
            config.experiment.planner,
            batch_size=sources_left,
            headroom_blocks=headroom_left,
        )
        plan = found.plan
        seen.append((layout, plan))
        num_candidates += found.num_passed_over
        missing += found.missing_blocks
        if plan is None:
            continue
        plans.append(plan)
        sources_left -= len(plan.source_blocks)
        headroom_left -= plan.num_fresh_blocks
        if sources_left <= 0:
            break
    if config.prefix_sharing == "copy" and sources_left > 0:
        groups, group_missing = plan_groups(
            [layout for layout, _ in seen],
            [plan for _, plan in seen],
            holders,
            config.experiment.planner,
            batch_size=sources_left,
            headroom_blocks=headroom_left,
        )
        replaced = {plan.request_id for plan in groups}
        plans = [plan for plan in plans if plan.request_id not in replaced] + groups
        missing += group_missing
    num_copied = sum(len(plan.shared_blocks) for plan in plans)
    return Round(tuple(plans), missing, num_candidates - num_copied)
