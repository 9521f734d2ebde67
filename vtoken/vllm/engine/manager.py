"""vToken's KV cache spec and its block manager: vLLM's full attention, counting places, not tokens.

vLLM's unchanged code handles a request that has evicted nothing. After the first eviction, the
number of blocks follows from the physical extent, and blocks are never hashed again (see
`vtoken.vllm.engine.coordinator`): the layout is not positional, and later K and V come from a
truncated context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vtoken.base.arrays import Bools
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_table import TokenTable
from vtoken.vllm.spec import VTokenAttentionSpec


@dataclass(frozen=True, slots=True)
class FirstDemand:
    """What a request without blocks takes first: `num_places` in `num_blocks` free blocks."""

    num_places: int
    num_blocks: int


class VTokenAttentionManager(FullAttentionManager):
    """vLLM's full-attention manager over places.

    The scheduler sets `runtime` after construction. `first_demand`: that of the request that was
    asked about last, None unless it waits for its first blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime: Runtime | None = None
        self.first_demand: FirstDemand | None = None
        self.hashed: Bools = np.zeros(len(self.block_pool.blocks), dtype=np.bool_)

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return False

    def is_truncated(self, request_id: str) -> bool:
        """Whether no block of the request may get a prefix hash from now on."""
        if self.runtime is None:
            return False
        if request_id == self.runtime.canary.request_id:
            return True  # no request may reuse the blocks of a check
        table = self.runtime.tables.get(request_id)
        if table is None:
            return self.runtime.swapper.has_evicted(request_id)
        return table.virtual

    def _num_places(self, request_id: str, num_tokens: int) -> int:
        """The places needed for `num_tokens` tokens in total, dead ones included."""
        if self.runtime is None:
            return num_tokens
        return self.runtime.required_extent(request_id, num_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        runtime, places = self.runtime, self._num_places(request_id, num_tokens)
        is_first = runtime is not None and request_id not in runtime.requests.held
        if (
            runtime is not None
            and is_first
            and apply_admission_cap
            and request_id not in runtime.swapper.requests
        ):
            # vLLM queries the entire prompt, without allocating.
            places = runtime.admission.peak_tokens(request_id, num_tokens, total_computed_tokens)
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            places,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        if is_first:
            self.first_demand = FirstDemand(places, needed)
        return needed

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        places = self._num_places(request_id, num_tokens)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, places, num_tokens_main_model
        )
        for block in blocks:
            self.hashed[block.block_id] = False
        return blocks

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any
    ) -> None:
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args)
        for block in new_computed_blocks:
            self.hashed[block.block_id] = True

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        request_id = request.request_id
        before = self.num_cached_block.get(request_id, 0)
        super().cache_blocks(request, num_tokens, *args, **kwargs)
        after = self.num_cached_block.get(request_id, 0)
        for block in self.req_to_blocks[request_id][before:after]:
            self.hashed[block.block_id] = block.block_hash is not None

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        if self.runtime is not None:
            self.runtime.release(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks


class VLLMBlockStore:
    """The core's `BlockStore` over vLLM's block pool and the manager's block tables."""

    def __init__(self, manager: VTokenAttentionManager, others: OtherGroups = ()) -> None:
        self._manager = manager
        self._others = others
        self._pool = manager.block_pool

    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def is_writable(self, block: int) -> bool:
        return bool(self._pool.is_block_writable(self._pool.blocks[block]))

    def first_not_writable(self, blocks: Sequence[int]) -> int | None:
        pool, may_be_written = self._pool.blocks, self._pool.is_block_writable
        for block in blocks:
            if not may_be_written(pool[block]):
                return block
        return None

    def is_shared(self, block: int) -> bool:
        return int(self._pool.blocks[block].ref_cnt) > 1

    def take(self, num_blocks: int) -> list[int]:
        ids = [block.block_id for block in self._pool.get_new_blocks(num_blocks)]
        self._manager.hashed[ids] = False
        return ids

    def borrow(self, num_blocks: int) -> list[int]:
        borrowed: list[int] = []
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        # Blocks without a hash are at the front of the queue, see `free_blocks`.
        while len(borrowed) < num_blocks and block is not queue.fake_free_list_tail:
            if block.block_hash is not None:
                break
            borrowed.append(block.block_id)
            block = block.next_free_block
        return borrowed

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        pool = self._pool.blocks
        self._manager.req_to_blocks[request_id][:] = [pool[block] for block in blocks]

    def remove(self, request_id: str, runs: Sequence[tuple[int, int]]) -> None:
        owned = self._manager.req_to_blocks[request_id]
        for start, end in reversed(runs):
            del owned[start:end]

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        wrong = []
        held = Counter[int]()
        for table in tables:
            held.update(table.blocks)
            owned = [block.block_id for block in self._manager.req_to_blocks[table.request_id]]
            if owned != table.blocks:
                wrong.append(
                    f"{table.request_id} holds blocks {owned} in vLLM, {table.blocks} in its table"
                )
        for group in self._others:
            held.update(group.block_ids())
        wrong += [
            f"block {block.block_id} has {block.ref_cnt} references, {held[block.block_id]} holders"
            for block in self._pool.blocks[1:]
            if block.ref_cnt != held[block.block_id]
        ]
        free, usable = self.num_free_blocks(), len(self._pool.blocks) - 1
        if free + len(held) != usable:
            wrong.append(f"{free} free and {len(held)} held blocks do not add up to {usable}")
        return wrong

    def blocks_from(self, request_id: str, first: int) -> list[int]:
        return [block.block_id for block in self._manager.req_to_blocks[request_id][first:]]

    def give_back(self, blocks: Sequence[int]) -> None:
        pool = self._pool.blocks
        self._pool.free_blocks([pool[block] for block in blocks])


def register_spec() -> None:
    """Register vToken's spec and manager with vLLM; grouped like full attention. Idempotent."""
    KVCacheSpecRegistry._ensure_registered()  # otherwise the built-in specs are never registered
    KVCacheSpecRegistry.register(
        VTokenAttentionSpec,
        manager_class=VTokenAttentionManager,
        uniform_type_base_spec=FullAttentionSpec,
    )
