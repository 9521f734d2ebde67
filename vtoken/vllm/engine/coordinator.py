"""vToken in vLLM's cache coordinator: what concerns all groups of a request at once.

1. After a request's first eviction none of its groups is hashed: K and V of a window, computed
   after it, come from a truncated context. A later request could otherwise combine them with clean
   blocks of the managed group.
2. What a waiting request takes, and what it needs at its peak, are sums over all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from vtoken.vllm.engine.manager import VTokenAttentionManager
from vtoken.vllm.spec import ManagedGroup


class VTokenCoordinatorMixin(KVCacheCoordinator):
    """Put before the class of a vLLM coordinator.

    `managed`: the manager of the group with token tables. `num_withheld` returns the free blocks
    that vLLM's watermark currently withholds from waiting requests, `waits` whether a request waits
    to be scheduled.
    """

    managed: VTokenAttentionManager
    num_withheld: Callable[[], int]
    waits: Callable[[str], bool]

    @classmethod
    def adopt(
        cls,
        coordinator: Any,
        group: ManagedGroup,
        num_withheld: Callable[[], int],
        waits: Callable[[str], bool],
    ) -> Any:
        """Turn a constructed `coordinator` into this one."""
        base = type(coordinator)
        coordinator.__class__ = type(f"VToken{base.__name__}", (cls, base), {})
        coordinator.managed = coordinator.single_type_managers[group.index]
        coordinator.num_withheld, coordinator.waits = num_withheld, waits
        return coordinator

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        if not self.managed.is_truncated(request.request_id):
            super().cache_blocks(request, num_computed_tokens)

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        self.managed.first_demand = None
        needed: int = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        runtime, demand = self.managed.runtime, self.managed.first_demand
        if runtime is None:
            return needed
        if (
            demand is None
            and runtime.requests.own_rules(request_id).session
            and self.waits(request_id)
        ):
            # Its next turn waits for blocks beside those that it holds.
            withheld = self.num_withheld()
            runtime.admission.record_demand(request_id, needed, withheld_blocks=withheld)
        if demand is None or needed > self.managed.block_pool.num_gpu_blocks:
            # More than there are: vLLM defers a request that hits states of this step.
            return needed
        others = needed - demand.num_blocks
        requirement = runtime.admission.requirement(request_id, demand.num_places, others)
        if request_id != runtime.canary.request_id:  # no request gives for a check
            runtime.admission.record_demand(
                request_id, needed, requirement, withheld_blocks=self.num_withheld()
            )
        return needed + requirement.extra_blocks

    def allocate_new_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_new_blocks(request_id, *args, **kwargs)
        runtime = self.managed.runtime
        if runtime is not None and request_id not in runtime.requests.held:
            held = len(self.managed.req_to_blocks[request_id])
            held += sum(group.held_blocks(request_id) for group in runtime.other_groups)
            runtime.admission.admitted(request_id, held)
        return blocks
