"""vToken in vLLM's model runner (V1): execute the step plan, hand attention physical counts.

Positions stay logical throughout; only what attention reads is physical: block tables, slot mapping
and sequence lengths of the requests that have evicted something.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.mirror import Mirror
from vtoken.step import StepPlan, WorkerReport
from vtoken.vllm import context, support
from vtoken.vllm.content_check import ContentCheck
from vtoken.vllm.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu_path import CPUDataPath
from vtoken.vllm.holes import HoleyRequest, LentRequest, Scratch
from vtoken.vllm.layout import learn_layout
from vtoken.vllm.probe import ProbedRequest
from vtoken.vllm.selftest import SelfTest


class VTokenCPURunner(CPUModelRunner):
    """`adopt` turns a plain CPU runner into this one after construction."""

    @staticmethod
    def adopt(runner: CPUModelRunner) -> VTokenCPURunner:
        runner.__class__ = VTokenCPURunner
        assert isinstance(runner, VTokenCPURunner)
        runner.mirrors = {}
        runner.plan = None
        runner.report = None
        return runner

    mirrors: dict[str, Mirror]
    plan: StepPlan | None
    report: WorkerReport | None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        layers = {
            name: layer
            for name, layer in self.compilation_config.static_forward_context.items()
            if isinstance(layer, Attention)
        }
        support.check_layers(layers)
        isa = next(iter(layers.values())).isa
        cache = self.kv_caches[0]
        self.vtoken_block_size = cache.shape[2]
        self.vtoken_layout = learn_layout(cache, isa)
        self.vtoken_scratch = Scratch()
        self.vtoken_copies = CPUCopyEngine(
            self.kv_caches, self.vtoken_layout, self.vtoken_block_size
        )
        builder = self.attn_groups[0][0].get_metadata_builder()
        layer = next(iter(layers.values()))
        SelfTest(CPUDataPath(layer, builder, cache, self.vtoken_layout)).run()
        self.vtoken_check = ContentCheck(self.vtoken_copies.contents, self.vtoken_block_size)

    # ------------------------------------------------------------ before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        plan: StepPlan | None = getattr(scheduler_output, "vtoken", None)
        self.plan = plan
        self.report = None
        context.set_current(None)
        if plan is None:
            return super()._update_states(scheduler_output)
        self.report = WorkerReport(plan.step)
        self._forget(scheduler_output)
        for request_id, step in plan.requests.items():
            state = self.requests[request_id]
            if request_id not in self.mirrors:
                self.mirrors[request_id] = Mirror.positional(
                    state.block_ids[0], step.num_tokens, self.vtoken_block_size
                )
            if step.blocks is not None:
                state.block_ids[0][:] = step.blocks
                row = self.input_batch.req_id_to_index.get(request_id)
                if row is not None:
                    self.input_batch.block_table.add_row((step.blocks,), row)
        if len(plan.source_slots):
            self.vtoken_check.before(plan, self.mirrors, self.report)
            self.report.copy_us = self.vtoken_copies.copy(plan.source_slots, plan.destination_slots)
            self.report.moved_tokens = len(plan.source_slots)
        result = super()._update_states(scheduler_output)
        for request_id, step in plan.requests.items():
            self.mirrors[request_id].apply(step)
        self.vtoken_check.after(plan, self.mirrors, self.report)
        return result

    def _forget(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self.mirrors.pop(request_id, None)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.mirrors.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self.mirrors.pop(request.req_id, None)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        plan = self.plan
        if plan is None or not (plan.requests or plan.probing or self.mirrors):
            return prepared
        step = context.StepContext(self.vtoken_layout, self.vtoken_scratch, self.vtoken_block_size)
        slot_mapping = self.input_batch.block_table[0].slot_mapping.gpu
        starts = self.query_start_loc.np
        for row, request_id in enumerate(self.input_batch.req_ids):
            first, stop = int(starts[row]), int(starts[row + 1])
            part = plan.requests.get(request_id)
            if part is not None:
                slot_mapping[first:stop] = torch.from_numpy(part.new_slots)
                self.seq_lens[row] = part.num_live
                self.optimistic_seq_lens_cpu[row] = part.num_live
                if part.scratch:
                    step.lent.append(
                        LentRequest(row, part.full_blocks, part.loose_slots, part.scratch)
                    )
                elif not part.dense:
                    _, slots = self.mirrors[request_id].live()
                    step.apart.append(HoleyRequest(row, slots, stop - first))
            elif plan.probing:
                self._follow(request_id, slot_mapping[first:stop].numpy())
            else:
                self.mirrors.pop(request_id, None)
                continue
            mirror = self.mirrors[request_id]
            if not plan.probing:
                mirror.forget_scores()
            elif plan.probe_layers is not None:
                step.probed.append(ProbedRequest(first, stop - first, mirror))
        if plan.probe_layers is not None:
            step.probe_layers = frozenset(plan.probe_layers)
        if step.lent or step.apart or step.probed:
            context.set_current(step)
        return prepared

    def _follow(self, request_id: str, new_slots: np.ndarray) -> None:
        """Keep the mirror of a request that has evicted nothing, for the probe."""
        mirror = self.mirrors.get(request_id)
        if mirror is None:
            state = self.requests[request_id]
            mirror = self.mirrors[request_id] = Mirror.positional(
                state.block_ids[0], state.num_computed_tokens, self.vtoken_block_size
            )
        mirror.append(new_slots.copy())

    # ------------------------------------------------------------ after it

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if output is EMPTY_MODEL_RUNNER_OUTPUT and self.report is not None:
            output = copy(output)  # that one is shared by all steps without tokens
            output.vtoken = self.report
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        context.set_current(None)
        output = super().sample_tokens(grammar_output)
        if self.report is None or self.plan is None:
            return output
        for request_id in self.plan.want_scores:
            mirror = self.mirrors.get(request_id)
            scores = None if mirror is None else mirror.scores()
            if scores is not None:
                self.report.scores[request_id] = scores
        target = getattr(output, "_model_runner_output", output)
        target.vtoken = self.report
        return output
