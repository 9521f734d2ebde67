"""vToken's model runner on CPU: copies, the self-test and the context that attention reads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.base.compiled import describe_kernels
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cpu import context
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu.data_path import CPUDataPath
from vtoken.vllm.cpu.holes import PackedSlots
from vtoken.vllm.cpu.layout import learn_layout
from vtoken.vllm.worker.executor import PhysicalStep, StepExecutor
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.runner_v1 import VTokenRunnerMixin
from vtoken.vllm.worker.scores import HostScores
from vtoken.vllm.worker.selftest import SelfTest

log = init_logger("vllm.vtoken")


class VTokenCPURunner(VTokenRunnerMixin, CPUModelRunner):
    """vLLM's V1 runner on the host, where everything runs in one thread, in program order."""

    def _vtoken_prepare(self, layers: dict[str, Any]) -> StepExecutor:
        self.vtoken_caches = [layer.kv_cache for layer in layers.values()]
        cache, layer = self.vtoken_caches[0], next(iter(layers.values()))
        block_size: int = cache.shape[2]
        self.vtoken_layout = learn_layout(cache, layer.isa)
        self._vtoken_shares_memory = len(self.kv_cache_config.kv_cache_groups) > 1
        self._vtoken_borrowed: frozenset[int] = frozenset()
        self.vtoken_side_buffer = context.SideBuffer()
        self.vtoken_packed = PackedSlots(len(cache), block_size, len(self.vtoken_caches))
        context.set_packed(self.vtoken_packed)
        self.vtoken_copies = CPUCopyEngine(self.vtoken_caches, self.vtoken_layout)
        builder = self.attn_groups[self.vtoken_group.index][0].get_metadata_builder()
        started = time.perf_counter()
        SelfTest(CPUDataPath(layer, builder, cache, self.vtoken_layout)).run()
        seconds = time.perf_counter() - started
        log.info("vToken: self-test of the data path: %.1f s, %s", seconds, describe_kernels())
        scores = HostScores(self._vtoken_keys, layer.impl.num_heads)
        return StepExecutor(block_size, self.vtoken_copies.contents, scores, Ranks.of_this_worker())

    def _vtoken_keys(self, layer: int) -> torch.Tensor:
        keys, _ = self.vtoken_layout.views(self.vtoken_caches[layer])
        return keys

    def _vtoken_copy(self, plan: StepPlan) -> None:
        assert self.executor is not None
        if len(plan.source_slots):
            copy_us = self.vtoken_copies.copy(plan.source_slots, plan.destination_slots)
            self.vtoken_packed.written(plan.destination_slots)
            self.executor.note_copy(copy_us)

    def _vtoken_present(self, step: PhysicalStep | None) -> None:
        assert self.executor is not None
        done = context.current()
        context.set_current(None)
        if self._vtoken_shares_memory:
            self._vtoken_borrow(() if step is None else step.with_holes.borrowed.values.tolist())
        if step is None:
            if done is not None:
                self.executor.note_packing(done.pack_ns // 1000, done.packed_tokens)
                if done.probe is not None:
                    self.executor.note_probe(done.probe.single_ns // 1000, done.probe.num_single)
            return
        if len(step.rows):
            tokens, slots = torch.from_numpy(step.writes)
            self._vtoken_table.slot_mapping.gpu[tokens] = slots
        current = context.StepContext(
            self.vtoken_layout,
            self.vtoken_packed,
            self.vtoken_side_buffer,
            len(self.vtoken_caches[0]),
            self.executor.block_size,
        )
        current.add(step)
        context.set_current(current)

    def _vtoken_borrow(self, blocks: Iterable[int]) -> None:
        """Forget what was packed into blocks that were not borrowed a step ago.

        Another group may have written them since.
        """
        fresh = frozenset(blocks) - self._vtoken_borrowed
        self._vtoken_borrowed = frozenset(blocks)
        if fresh:
            self._vtoken_zero(fresh)
            size = self.vtoken_packed.block_size
            first = np.array(sorted(fresh), dtype=np.int64)[:, None] * size
            self.vtoken_packed.written((first + np.arange(size)).ravel())
