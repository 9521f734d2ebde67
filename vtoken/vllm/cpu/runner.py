"""vToken in vLLM's model runner on CPU: executes the step plan.

Positions stay logical. Only the inputs of attention are physical: block tables, slot mapping and
sequence lengths of the requests that have evicted something.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.base.arrays import Ints
from vtoken.base.compiled import describe_kernels
from vtoken.core.protocol.mirror import BlockTables
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cpu import context
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu.data_path import CPUDataPath
from vtoken.vllm.cpu.holes import PackedSlots
from vtoken.vllm.cpu.layout import learn_layout
from vtoken.vllm.drafts import NO_DRAFTS, num_drafts, num_rejected
from vtoken.vllm.spec import ManagedGroup, VTokenAttentionSpec
from vtoken.vllm.startup import startup_error, support
from vtoken.vllm.worker.executor import Batch, PhysicalStep, StepExecutor
from vtoken.vllm.worker.managed_layers import managed_layers
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import HostScores
from vtoken.vllm.worker.selftest import SelfTest
from vtoken.vllm.worker.stages import Stages, stages_of_this_worker

log = init_logger("vllm.vtoken")


class VTokenCPURunner(CPUModelRunner):
    """vLLM's model runner V1 on the host, where everything runs in one thread, in program order."""

    executor: StepExecutor | None = None  # None: the cache does not exist yet
    vtoken_group: ManagedGroup
    vtoken_stages: Stages
    intermediate_tensors: Any
    requests: dict[str, Any]
    input_batch: Any
    _vtoken_zeroes = False
    _vtoken_drafts = NO_DRAFTS  # of the requests that have any in this step

    @classmethod
    def adopt(cls, runner: Any) -> Any:
        """Turn a constructed runner of the base class into this one."""
        runner.__class__ = cls
        return runner

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """As vLLM's, but the state within a prompt is cached at the end of a step alone.

        vLLM's Mamba 2 layers offer it from inside a step, which their CPU kernel does not compute.
        """
        specs: dict[str, Any] = super().get_kv_cache_spec()
        return {name: _without_checkpoints(spec) for name, spec in specs.items()}

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if is_profiling:
            return  # a small temporary cache
        with startup_error.kept():
            num_stages = self.vllm_config.parallel_config.pipeline_parallel_size
            support.check_kv_cache(kv_cache_config, VTokenAttentionSpec, num_stages=num_stages)
            self.vtoken_group = group = ManagedGroup.of(kv_cache_config)
            self.vtoken_stages = stages_of_this_worker(self.vllm_config, len(group.layer_names))
            layers = managed_layers(
                self.compilation_config.static_forward_context,
                group,
                self.vtoken_stages.first_layer,
            )
            self.executor = self._vtoken_prepare(layers)
        self._vtoken_zeroes = kv_cache_config.needs_kv_cache_zeroing

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
        self._vtoken_make_room()
        return StepExecutor(
            block_size,
            self.vtoken_copies.contents,
            scores,
            Ranks.of_this_worker(),
            self.vtoken_stages,
        )

    def _vtoken_make_room(self) -> None:
        """Make the tensors into which a later stage of a pipeline takes hidden states.

        vLLM makes them in its warm-up, which its CPU build leaves out with --enforce-eager.
        """
        if self.vtoken_stages.first_layer and self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def _vtoken_keys(self, layer: int) -> torch.Tensor:
        """The keys of the model's layer of full attention `layer`, which this stage holds."""
        cache = self.vtoken_caches[layer - self.vtoken_stages.first_layer]
        keys, _ = self.vtoken_layout.views(cache)
        return keys

    # ------------------------------------------------------------ before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        executor, plan = self.executor, getattr(scheduler_output, "vtoken", None)
        if executor is None:
            return super()._update_states(scheduler_output)
        self._vtoken_present(None)
        if plan is None:
            self._vtoken_drafts = NO_DRAFTS
            executor.begin(None, ())
            return super()._update_states(scheduler_output)
        self._vtoken_drafts = num_drafts(scheduler_output)
        executor.begin(plan, _restarted(scheduler_output), self._vtoken_drafts)
        with executor.stages.told_of_errors():
            with executor.ranks.deferred_errors():
                self._vtoken_replace_tables()
                executor.before_copies()
                self._vtoken_copy(plan)
            result = super()._update_states(scheduler_output)
            executor.apply()
        return result

    def _vtoken_replace_tables(self) -> None:
        """Give the requests whose blocks changed their new block tables."""
        assert self.executor is not None
        for request_id, table in self.executor.prepare(self._vtoken_blocks):
            blocks, held = table.tolist(), self._vtoken_blocks(request_id)
            self._vtoken_zero(set(blocks).difference(held))
            held[:] = blocks
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                self._vtoken_table.add_row(blocks, row)

    def _vtoken_blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self.requests[request_id].block_ids[self.vtoken_group.index]
        return blocks

    def _vtoken_zero(self, blocks: Iterable[int]) -> None:
        """Zero `blocks`, which may hold a state of another group, before tokens are copied to them.

        A kernel reads the other slots of a block too, and multiplies them by 0: a NaN would show.
        vLLM zeroes the blocks that it allocates itself, after the copies.
        """
        if self._vtoken_zeroes and (found := sorted(blocks)):
            self._zero_block_ids(found)

    @property
    def _vtoken_table(self) -> Any:
        """vLLM's block tables of the managed group."""
        return self.input_batch.block_table[self.vtoken_group.index]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.executor is not None:
            step = self.executor.physical(self._vtoken_batch())
            if step is not None:
                self._vtoken_present(step)
        return prepared

    def _vtoken_batch(self) -> Batch:
        batch, table = self.input_batch, self._vtoken_table
        starts: np.ndarray = self.query_start_loc.np

        def tables(rows: Ints) -> BlockTables:
            blocks: Any = table.block_table.np
            counts = table.num_blocks_per_row[rows].astype(np.int64)
            return BlockTables(blocks.reshape(-1), rows * blocks.shape[1], counts)

        return Batch.of(batch.req_ids, starts, batch.num_computed_tokens_cpu, tables)

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

    # ------------------------------------------------------------ after the forward

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if output is EMPTY_MODEL_RUNNER_OUTPUT and self.executor is not None:
            return self.executor.attach(copy(output))  # a singleton: do not change it
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self.executor is None:
            return output
        self._vtoken_present(None)
        if self._vtoken_drafts:
            self.executor.reject(num_rejected(self._vtoken_drafts, output))
        return self.executor.attach(output)


def _restarted(scheduler_output: Any) -> Iterator[str]:
    """Requests that finish, resume or start in this step, whose mirrors are obsolete."""
    yield from scheduler_output.finished_req_ids
    yield from scheduler_output.scheduled_cached_reqs.resumed_req_ids
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id


def _without_checkpoints(spec: Any) -> Any:
    """A `spec` of states of which none is cached from inside a step; any other spec unchanged."""
    if not isinstance(spec, MambaSpec):
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
