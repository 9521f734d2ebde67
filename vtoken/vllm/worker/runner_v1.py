"""vToken in vLLM's model runner V1 on any device: executes the step plan.

Positions stay logical. Only the inputs of attention are physical: block tables, slot mapping and
sequence lengths of the requests that have evicted something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import BlockTables
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.spec import ManagedGroup, VTokenAttentionSpec
from vtoken.vllm.startup import startup_error, support
from vtoken.vllm.worker.executor import Batch, PhysicalStep, StepExecutor
from vtoken.vllm.worker.managed_layers import managed_layers


class VTokenRunnerMixin:
    """Put before a V1 model runner class in the bases.

    A device implements three methods: `_vtoken_prepare` (called when the cache exists),
    `_vtoken_copy` (make the plan's relocations, if any) and `_vtoken_present` (pass the step to
    attention; None clears it).
    """

    executor: StepExecutor | None = None
    vtoken_group: ManagedGroup
    _vtoken_zeroes = False
    requests: dict[str, Any]
    input_batch: Any

    @classmethod
    def adopt(cls, runner: Any) -> Any:
        """Turn a constructed runner of the base class into this one."""
        runner.__class__ = cls
        return runner

    def _vtoken_prepare(self, layers: dict[str, Any]) -> StepExecutor:
        raise NotImplementedError

    def _vtoken_copy(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def _vtoken_present(self, step: PhysicalStep | None) -> None:
        raise NotImplementedError

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)  # type: ignore[misc]
        if is_profiling:
            return  # a small temporary cache
        config: Any = self.compilation_config  # type: ignore[attr-defined]
        with startup_error.kept():
            support.check_kv_cache(kv_cache_config, VTokenAttentionSpec)
            self.vtoken_group = ManagedGroup.of(kv_cache_config)
            layers = managed_layers(config.static_forward_context, self.vtoken_group)
            self.executor = self._vtoken_prepare(layers)
        self._vtoken_zeroes = kv_cache_config.needs_kv_cache_zeroing

    # ------------------------------------------------------------ before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        executor, plan = self.executor, getattr(scheduler_output, "vtoken", None)
        if executor is None:
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        self._vtoken_present(None)
        if plan is None:
            executor.begin(None, ())
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        executor.begin(plan, _restarted(scheduler_output))
        with executor.ranks.deferred_errors():
            for request_id, table in executor.prepare(self._vtoken_blocks):
                blocks, held = table.tolist(), self._vtoken_blocks(request_id)
                self._vtoken_zero(set(blocks).difference(held))
                held[:] = blocks
                row = self.input_batch.req_id_to_index.get(request_id)
                if row is not None:
                    self._vtoken_table.add_row(blocks, row)
            executor.before_copies()
            self._vtoken_copy(plan)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        executor.apply()
        return result

    def _vtoken_blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self.requests[request_id].block_ids[self.vtoken_group.index]
        return blocks

    def _vtoken_zero(self, blocks: Iterable[int]) -> None:
        """Zero `blocks`, which may hold a state of another group, before tokens are copied to them.

        A kernel reads the other slots of a block too, and multiplies them by 0: a NaN would show.
        vLLM zeroes the blocks that it allocates itself, after the copies.
        """
        if self._vtoken_zeroes and (found := sorted(blocks)):
            self._zero_block_ids(found)  # type: ignore[attr-defined]

    @property
    def _vtoken_table(self) -> Any:
        """vLLM's block tables of the managed group."""
        return self.input_batch.block_table[self.vtoken_group.index]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        if self.executor is not None:
            step = self.executor.physical(self._vtoken_batch())
            if step is not None:
                self._vtoken_present(step)
        return prepared

    def _vtoken_batch(self) -> Batch:
        batch, table = self.input_batch, self._vtoken_table
        starts: np.ndarray = self.query_start_loc.np  # type: ignore[attr-defined]

        def tables(rows: Ints) -> BlockTables:
            blocks: Any = table.block_table.np
            counts = table.num_blocks_per_row[rows].astype(np.int64)
            return BlockTables(blocks.reshape(-1), rows * blocks.shape[1], counts)

        return Batch.of(batch.req_ids, starts, batch.num_computed_tokens_cpu, tables)

    # ------------------------------------------------------------ after the forward

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        if output is EMPTY_MODEL_RUNNER_OUTPUT and self.executor is not None:
            return self.executor.attach(copy(output))  # a singleton: do not change it
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.executor is None:
            return output
        self._vtoken_present(None)
        return self.executor.attach(output)


def _restarted(scheduler_output: Any) -> Iterator[str]:
    """Requests that finish, resume or start in this step, whose mirrors are obsolete."""
    yield from scheduler_output.finished_req_ids
    yield from scheduler_output.scheduled_cached_reqs.resumed_req_ids
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id
