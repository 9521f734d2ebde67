"""The groups of layers that vToken does not manage, read from vLLM's managers of their blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from vtoken.base.arrays import Ints
from vtoken.vllm.spec import ManagedGroup
from vtoken.wire import GroupKind

KINDS: dict[type, GroupKind] = {
    SlidingWindowSpec: "window",
    ChunkedLocalAttentionSpec: "chunked",
    MambaSpec: "state",
}


class VLLMGroup:
    """The core's `OtherGroup` over one manager of vLLM's; `requests`: the scheduler's, by id.

    1. A window or chunk leaves null blocks at the front of a request's blocks, and nowhere else.
    """

    def __init__(
        self,
        index: int,
        manager: Any,
        num_layers: int,
        vllm_config: Any,
        requests: Mapping[str, Any],
    ) -> None:
        spec = manager.kv_cache_spec
        self.index = index
        self.kind = next(kind for of, kind in KINDS.items() if isinstance(spec, of))
        self.num_layers = num_layers
        self.block_size: int = spec.block_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self.block_bytes: int = ranks * num_layers * spec.page_size_bytes
        self._manager, self._spec, self._requests = manager, spec, requests
        self._max_model_len = vllm_config.model_config.max_model_len
        self._state_blocks = 0
        if self.kind == "state":
            self._state_blocks = spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        if self.kind == "state":
            return self._state_blocks
        limit: int = self._spec.max_admission_blocks_per_request(chunk_tokens, self._max_model_len)
        return min(-(-num_tokens // self.block_size), limit)

    def growth(self, request_ids: Sequence[str], num_new: Ints, steps: int) -> Ints:
        pairs = zip(request_ids, num_new.tolist(), strict=True)
        growth = [self._growth(self._requests[name], count, steps) for name, count in pairs]
        return np.array(growth, dtype=np.int64)

    def _growth(self, request: Any, num_new: int, steps: int) -> int:
        blocks = self._manager.req_to_blocks[request.request_id]
        computed: int = request.num_computed_tokens
        taken = max(0, -(-(computed + num_new) // self.block_size) - len(blocks))
        if self.kind == "state":
            return min(taken, self._state_blocks - len(self._held(blocks))) if taken else 0
        # vLLM gives back what no token in flight reads, before it allocates.
        settled = computed - request.num_in_flight_tokens + steps - 1
        left: int = self._manager.get_num_skipped_tokens(settled) // self.block_size
        return taken - max(0, min(left, len(blocks)) - self._num_left(blocks))

    def held_blocks(self, request_id: str) -> int:
        return len(self._held(self._manager.req_to_blocks.get(request_id, [])))

    def block_ids(self) -> list[int]:
        owned = self._manager.req_to_blocks.values()
        return [block.block_id for blocks in owned for block in self._held(blocks)]

    def _held(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        if self.kind == "state":
            return [block for block in blocks if not block.is_null]
        return blocks[self._num_left(blocks) :]

    def _num_left(self, blocks: list[KVCacheBlock]) -> int:
        """How many blocks at the front have left the window."""
        return bisect_left(blocks, True, key=lambda block: not block.is_null)


def other_groups(
    coordinator: Any,
    managed: ManagedGroup,
    kv_cache_config: Any,
    vllm_config: Any,
    requests: Mapping[str, Any],
) -> list[VLLMGroup]:
    """All groups of `coordinator` but the managed one; `requests`: the scheduler's, by id."""
    groups = zip(coordinator.single_type_managers, kv_cache_config.kv_cache_groups, strict=True)
    return [
        VLLMGroup(index, manager, len(group.layer_names), vllm_config, requests)
        for index, (manager, group) in enumerate(groups)
        if index != managed.index
    ]
