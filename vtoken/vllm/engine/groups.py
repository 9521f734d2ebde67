"""The groups of layers that vToken does not manage, read from vLLM's managers of their blocks."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from vtoken.vllm.spec import ManagedGroup
from vtoken.wire import GroupKind

KINDS: dict[type, GroupKind] = {
    SlidingWindowSpec: "window",
    ChunkedLocalAttentionSpec: "chunked",
    MambaSpec: "state",
}


class VLLMGroup:
    """The core's `OtherGroup` over one manager of vLLM's.

    1. A window or chunk leaves null blocks at the front of a request's blocks, and nowhere else.
    """

    def __init__(self, index: int, manager: Any, num_layers: int, vllm_config: Any) -> None:
        spec = manager.kv_cache_spec
        self.index = index
        self.kind = next(kind for of, kind in KINDS.items() if isinstance(spec, of))
        self.num_layers = num_layers
        self.block_size: int = spec.block_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self.block_bytes: int = ranks * num_layers * spec.page_size_bytes
        self._manager, self._spec = manager, spec
        self._max_model_len = vllm_config.model_config.max_model_len
        self._state_blocks = 0
        if self.kind == "state":
            self._state_blocks = spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        if self.kind == "state":
            return self._state_blocks
        limit: int = self._spec.max_admission_blocks_per_request(chunk_tokens, self._max_model_len)
        return min(-(-num_tokens // self.block_size), limit)

    def held_blocks(self, request_id: str) -> int:
        return len(self._held(self._manager.req_to_blocks.get(request_id, [])))

    def block_ids(self) -> list[int]:
        owned = self._manager.req_to_blocks.values()
        return [block.block_id for blocks in owned for block in self._held(blocks)]

    def _held(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        if self.kind == "state":
            return [block for block in blocks if not block.is_null]
        return blocks[bisect_left(blocks, True, key=lambda block: not block.is_null) :]


def other_groups(
    coordinator: Any, managed: ManagedGroup, kv_cache_config: Any, vllm_config: Any
) -> list[VLLMGroup]:
    """All groups of `coordinator` but the managed one."""
    groups = zip(coordinator.single_type_managers, kv_cache_config.kv_cache_groups, strict=True)
    return [
        VLLMGroup(index, manager, len(group.layer_names), vllm_config)
        for index, (manager, group) in enumerate(groups)
        if index != managed.index
    ]
