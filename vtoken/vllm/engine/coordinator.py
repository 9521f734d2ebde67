"""vToken in vLLM's cache coordinator: what concerns all groups of a request at once.

1. After a request's first eviction none of its groups is hashed: K and V of a window, computed
   after it, come from a truncated context. A later request could otherwise combine them with clean
   blocks of the managed group.
2. A waiting request's demand is the sum over its groups.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

from vtoken.vllm.engine.manager import VTokenAttentionManager
from vtoken.vllm.spec import ManagedGroup


class VTokenCoordinatorMixin(ABC):  # the base of vLLM's class, so that instances can change theirs
    """Put before the class of a vLLM coordinator.

    `managed`: the manager of the group with token tables; `others`: those of the other groups. The
    scheduler sets `num_withheld`, which returns the free blocks that vLLM's watermark currently
    withholds from waiting requests.
    """

    managed: VTokenAttentionManager
    others: list[Any]
    num_withheld: Callable[[], int]

    @classmethod
    def adopt(cls, coordinator: Any, group: ManagedGroup) -> Any:
        """Turn a constructed `coordinator` into this one."""
        base = type(coordinator)
        coordinator.__class__ = type(f"VToken{base.__name__}", (cls, base), {})
        managers = coordinator.single_type_managers
        coordinator.managed = managers[group.index]
        coordinator.others = [manager for manager in managers if manager is not coordinator.managed]
        coordinator.num_withheld = lambda: 0
        return coordinator

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        if not self.managed.is_truncated(request.request_id):
            super().cache_blocks(request, num_computed_tokens)  # type: ignore[misc]

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        self.managed.requirement = None
        needed: int = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)  # type: ignore[misc]
        runtime, requirement = self.managed.runtime, self.managed.requirement
        if runtime is None or requirement is None:
            return needed
        if request_id != runtime.canary.request_id:  # no request gives for a check
            runtime.admission.record_demand(
                request_id, needed, requirement, withheld_blocks=self.num_withheld()
            )
        return needed + requirement.extra_blocks
