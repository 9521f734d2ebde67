"""vToken's CPU attention backend: vLLM's own, plus packing for holes and the score probe.

The stock kernel computes all attention. This backend adds three things: the KV cache spec that
selects vToken's block manager, block sizes down to 16, and the packing of requests with holes (see
`vtoken.vllm.cpu.holes`). Requests read from the side buffer split the batch into two kernel calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vtoken.vllm.cpu import context
from vtoken.vllm.cpu.compiled_probe import StepProbe
from vtoken.vllm.cpu.holes import BufferedRequests, PackCopies, SideBufferPlan, plan_side_buffer
from vtoken.vllm.spec import VTokenAttentionSpec


@dataclass(slots=True)
class Part:
    """One part of a split batch: its query rows [k] and their attention metadata."""

    rows: torch.Tensor
    metadata: CPUAttentionMetadata


@dataclass
class VTokenMetadata(CPUAttentionMetadata):
    """The stock metadata; `step` is None in a step that does not concern vToken.

    `probe`: None for a drafter's layers, which are never probed.
    """

    step: context.StepContext | None = None
    probe: StepProbe | None = None
    borrowed_copies: PackCopies | None = None
    side_plan: SideBufferPlan | None = None
    side_buffer: context.SideBuffer | None = None
    side_part: Part | None = None
    main_part: Part | None = None  # None when all requests are read from the side buffer


class VTokenCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return VTokenAttentionSpec.of(super().customize_spec(spec))

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return VTokenCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return VTokenCPUMetadataBuilder


class VTokenCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """`of_drafter`: whether it builds for a drafter's layers alone. vLLM asks for their metadata in
    the model's forward too, where nobody reads it.
    """

    of_drafter = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if self.of_drafter or not isinstance(self.kv_cache_spec, VTokenAttentionSpec):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        step = context.current()
        if step is not None:
            common_attn_metadata = _with_physical_lengths(common_attn_metadata, step)
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if step is None:
            return stock
        metadata = VTokenMetadata(**vars(stock), step=step, probe=step.probe)
        step.packed.written(metadata.slot_mapping.numpy())
        if step.borrowing is not None:
            metadata.block_table = metadata.block_table.clone(memory_format=torch.contiguous_format)
            metadata.borrowed_copies = step.packed.plan(
                step.borrowing, metadata.block_table.numpy()
            )
        if step.buffered is not None:
            self._split(metadata, common_attn_metadata, step.buffered, step.side_buffer)
        return metadata

    def build_for_drafting(
        self, common_attn_metadata: Any, draft_index: int
    ) -> CPUAttentionMetadata:
        """As vLLM's, of one pass of a drafter's layers, with the lengths that attention reads.

        Requests with holes are always read from the side buffer: what the model's layers have
        packed into borrowed blocks is not there in the drafter's.
        """
        step = context.current()
        if step is None or step.ahead is None:
            return super().build_for_drafting(common_attn_metadata, draft_index)
        common = _with_physical_lengths(common_attn_metadata, step)
        stock = super().build(0, common, fast_build=True)
        buffered = step.ahead.buffered(common.query_start_loc_cpu, common.seq_lens)
        if buffered is None:
            return stock
        metadata = VTokenMetadata(**vars(stock), step=step)
        self._split(metadata, common, buffered, step.drafter_buffer)
        return metadata

    def _split(
        self,
        metadata: VTokenMetadata,
        common: Any,
        requests: BufferedRequests,
        buffer: context.SideBuffer | None,
    ) -> None:
        """Read `requests` from the side `buffer`, and the others from the cache."""
        assert metadata.step is not None
        packed, buffered = metadata.step.packed, torch.from_numpy(requests.rows)
        plan = plan_side_buffer(requests, packed.num_blocks, packed.block_size)
        metadata.side_plan, metadata.side_buffer = plan, buffer
        mask = torch.zeros(common.num_reqs, dtype=torch.bool)
        mask[buffered] = True
        rest = torch.nonzero(~mask).flatten()
        metadata.side_part = self._part(metadata, common, buffered, plan.seq_lens, plan.block_table)
        if len(rest):
            metadata.main_part = self._part(
                metadata, common, rest, common.seq_lens[rest], metadata.block_table[rest]
            )

    def _part(
        self,
        batch: CPUAttentionMetadata,
        common: Any,
        requests: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> Part:
        starts = common.query_start_loc
        lengths = starts[requests + 1] - starts[requests]
        rows = torch.cat(
            [torch.arange(int(starts[i]), int(starts[i + 1])) for i in requests.tolist()]
        )
        query_start_loc = torch.zeros(len(requests) + 1, dtype=starts.dtype)
        query_start_loc[1:] = torch.cumsum(lengths, 0)
        sub = replace(
            common,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens.contiguous(),
            num_reqs=len(requests),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table.contiguous(),
            slot_mapping=batch.slot_mapping[rows],
        )
        return Part(rows, super().build(0, sub))


def _with_physical_lengths(common: Any, step: context.StepContext) -> Any:
    """`common` with the lengths that attention reads; layers of other groups read logical ones."""
    if not len(step.rows):
        return common
    seq_lens = common.seq_lens.clone()
    seq_lens[torch.from_numpy(step.rows)] -= torch.from_numpy(step.num_dead).to(seq_lens.dtype)
    return replace(
        common,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        max_seq_len=int(seq_lens[: common.num_reqs].max()),
    )


class VTokenCPUImpl(CPUAttentionBackendImpl):
    vtoken_layer: int

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *scales: Any,
        **named_scales: Any,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, "step", None)
        copies = getattr(attn_metadata, "borrowed_copies", None)
        if step is not None and copies is not None:
            started = time.perf_counter_ns()
            copies.copy(kv_cache, kv_cache, step.layout)
            step.pack_ns += time.perf_counter_ns() - started
            step.packed.copied()
        if step is None or attn_metadata is None or attn_metadata.side_plan is None:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output, *scales),
                **named_scales,
            )
        else:
            self._forward_parts(layer, query, key, value, kv_cache, attn_metadata, output)
        probe = getattr(attn_metadata, "probe", None)
        if step is not None and probe is not None:
            probe.add(
                self.vtoken_layer,
                query,
                kv_cache,
                step.layout,
                scale=self.scale,
                soft_cap=float(self.logits_soft_cap or 0.0),
                sinks=self.sinks,
            )
        return output

    def _forward_parts(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: VTokenMetadata,
        output: torch.Tensor,
    ) -> None:
        step, plan, side_buffer = metadata.step, metadata.side_plan, metadata.side_buffer
        assert step is not None
        assert plan is not None
        assert side_buffer is not None
        started = time.perf_counter_ns()
        buffer = side_buffer.packed(plan, kv_cache)
        step.pack_ns += time.perf_counter_ns() - started
        for part, cache in ((metadata.main_part, kv_cache), (metadata.side_part, buffer)):
            if part is None:
                continue
            out = torch.empty_like(output[: len(part.rows)])
            super().forward(layer, query[part.rows], key, value, cache, part.metadata, out)
            output[part.rows] = out
