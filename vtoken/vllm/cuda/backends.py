"""vToken's CUDA attention backends: vLLM's FlashAttention 3 and Triton, at page size 1 for holes.

vLLM's own kernels compute all attention, with one call a layer. These backends add three things:

- the KV cache spec that selects vToken's block manager, and the only cache layout with one row a
  slot (see `layout`);
- separate sequence lengths for attention: attention reads physical lengths, while vLLM's sampler
  compares logical lengths with the prompt's. The buffer is the same in every step, so captured
  graphs read it too;
- in a step with holes, a page table of page size 1 for the entire batch, and a view of the cache
  with that page size. Such a step never runs in a full graph (`runner`), whose kernels were
  captured for page size S.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
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
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.layout import keys_of, page_view
from vtoken.vllm.cuda.signals.probing import DeviceProbe
from vtoken.vllm.spec import VTokenAttentionSpec


class PhysicalBuilderMixin:
    """Put before a vLLM metadata builder: physical lengths, page size 1 in steps with holes."""

    block_size: int
    kv_cache_spec: Any

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        rows = max(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        if not isinstance(self.kv_cache_spec, VTokenAttentionSpec):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        step = steps.current()
        common = self._with_physical_lengths(common_attn_metadata, step)
        if step is None or not step.has_holes:
            metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
            metadata.vtoken_step = step
            return metadata
        common = replace(
            common,
            block_table_tensor=step.pages.batch(
                common.block_table_tensor,
                step.physical.with_holes.index,
                step.resident,
                common.max_seq_len,
            ),
        )
        stock, self.block_size = self.block_size, 1  # FlashAttention 3 schedules by page size
        try:
            metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        finally:
            self.block_size = stock
        metadata.vtoken_step = step
        return metadata

    def _with_physical_lengths(self, common: Any, step: steps.CUDAStep | None) -> Any:
        seq_lens = self._seq_lens[: common.num_reqs]
        seq_lens.copy_(common.seq_lens[: common.num_reqs])
        if step is None or len(step.physical.rows) == 0:
            return replace(common, seq_lens=seq_lens)
        lengths = np.stack([step.physical.rows, step.physical.seq_lens])
        bound = common.seq_lens_cpu_upper_bound.clone()
        bound[lengths[0]] = torch.from_numpy(lengths[1]).to(bound.dtype)
        uploaded = upload(lengths, seq_lens.device)
        seq_lens.index_copy_(0, uploaded[0], uploaded[1].to(seq_lens.dtype))
        return replace(
            common,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=bound,
            max_seq_len=int(bound[: common.num_reqs].max()),
        )


class PagedImplMixin:
    """Put before a vLLM attention implementation: reads steps with holes at page size 1.

    vLLM's code writes K and V: these backends write by slot, outside of `forward`.
    """

    vtoken_paged_impl = True
    vtoken_layer: int
    scale: float
    logits_soft_cap: float | None
    sinks: torch.Tensor | None
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
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cache = kv_cache
        step: steps.CUDAStep | None = getattr(attn_metadata, "vtoken_step", None)
        if step is not None and step.has_holes:
            if self._paged is None or self._paged.data_ptr() != kv_cache.data_ptr():
                self._paged = page_view(kv_cache)
            cache = self._paged
        result: torch.Tensor = super().forward(  # type: ignore[misc]
            layer,
            query,
            key,
            value,
            cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        if step is not None and step.probe is not None:
            self._probe(step.probe, query, kv_cache)
        return result

    def _probe(self, probe: DeviceProbe, query: torch.Tensor, kv_cache: torch.Tensor) -> None:
        soft_cap = float(self.logits_soft_cap or 0.0)
        probe.add_layer(
            self.vtoken_layer,
            query,
            keys_of(kv_cache),
            scale=self.scale,
            soft_cap=soft_cap,
            sinks=self.sinks,
        )


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
