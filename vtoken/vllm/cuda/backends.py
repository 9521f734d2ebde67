"""vToken's CUDA attention backends: vLLM's FlashAttention 3 and Triton, at page size 1.

vLLM's own kernels compute all attention, with one call a layer. These backends add three things:

- the KV cache spec that selects vToken's block manager, and the only cache layout with one row a
  slot (see `layout`);
- the page tables and lengths of `pages` in place of vLLM's: attention reads physical lengths, while
  vLLM's sampler compares logical lengths with the prompt's;
- a view of the cache with page size 1.

All steps of the managed group are read so, and the tables never move: a full graph that was
captured once replays any of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.layout import page_view
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.spec import VTokenAttentionSpec


class PhysicalBuilderMixin:
    """Put before a vLLM metadata builder: the managed group reads `vtoken_tables`.

    The runner sets `vtoken_tables` before the first `build`. Other groups keep vLLM's metadata.
    """

    vtoken_tables: PageTables
    block_size: int
    kv_cache_spec: Any

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._is_managed = isinstance(kv_cache_spec, VTokenAttentionSpec)
        if self._is_managed:
            self.block_size = 1  # FlashAttention 3 schedules by page size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        if self._is_managed:
            common = self._at_page_size_one(common)
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        metadata.vtoken_paged = self._is_managed
        return metadata

    def _at_page_size_one(self, common: Any) -> Any:
        tables, rows, step = self.vtoken_tables, common.num_reqs, steps.current()
        inputs = {"seq_lens": tables.seq_lens[:rows], "block_table_tensor": tables.pages[:rows]}
        if step is None:
            tables.clear(common.seq_lens[:rows])
            return replace(common, **inputs)
        max_lens = step.max_lens[:rows]
        return replace(
            common,
            **inputs,
            seq_lens_cpu_upper_bound=torch.from_numpy(max_lens),
            max_seq_len=int(max_lens.max()),
        )


class PagedImplMixin:
    """Put before a vLLM attention implementation: reads the managed group at page size 1.

    vLLM's code writes K and V: these backends write by slot, outside of `forward`. The runner sets
    `vtoken_signals`, which gets the layer's queries, inside of full graphs too.
    """

    vtoken_paged_impl = True
    vtoken_layer: int
    vtoken_signals: AttentionLayer | None = None
    _paged: torch.Tensor | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **named_scales: Any,
    ) -> torch.Tensor:
        cache, paged = kv_cache, getattr(attn_metadata, "vtoken_paged", False)
        if paged:
            if self._paged is None or self._paged.data_ptr() != kv_cache.data_ptr():
                self._paged = page_view(kv_cache)
            cache = self._paged
        result: torch.Tensor = super().forward(  # type: ignore[misc]
            layer, query, key, value, cache, attn_metadata, output, *scales, **named_scales
        )
        if paged and self.vtoken_signals is not None:
            self.vtoken_signals.save(query)
            step = steps.current()
            if step is not None and step.probe is not None:
                step.probe.add_layer(self.vtoken_layer, query)
        return result


class _SlotLayoutMixin:
    """Put before a vLLM backend class: vToken's spec, and the layout with one row a slot."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return VTokenAttentionSpec.of(super().customize_spec(spec))  # type: ignore[misc]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)


class VTokenFlashBuilder(PhysicalBuilderMixin, FlashAttentionMetadataBuilder):
    pass


class VTokenFlashImpl(PagedImplMixin, FlashAttentionImpl):
    pass


class VTokenFlashBackend(_SlotLayoutMixin, FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return VTokenFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return VTokenFlashBuilder


class VTokenTritonBuilder(PhysicalBuilderMixin, TritonAttentionMetadataBuilder):
    pass


class VTokenTritonImpl(PagedImplMixin, TritonAttentionImpl):
    pass


class VTokenTritonBackend(_SlotLayoutMixin, TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return VTokenTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return VTokenTritonBuilder
