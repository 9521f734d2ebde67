"""`DeviceExecutor` in vLLM's runners, up to the device calls: V1 in the interpreted engine, V2 here
over a stand-in that keeps only the order of calls and the block tables' arithmetic.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.support.core.request_step import RequestStep, steps_of
from vtoken.base.arrays import Ragged
from vtoken.base.errors import UnsupportedError
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Signal
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.device_executor import DeviceExecutor
from vtoken.vllm.cuda.runner import GuardedRunnerMixin
from vtoken.vllm.cuda.runner_v2 import VTokenV2Mixin
from vtoken.vllm.cuda.support import check_layers
from vtoken.vllm.startup.cuda_rules import OPT_IN, cuda_rules
from vtoken.vllm.touchpoints import register
from vtoken.vllm.worker.ranks import Ranks

pytestmark = pytest.mark.vllm

S, BLOCKS = 4, 12


class Tables:
    """vLLM's `BlockTables.append_block_ids`, on the host."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def append_block_ids(self, req_index: int, new: tuple[list[int], ...], overwrite: bool) -> None:
        row = [] if overwrite else self.rows[req_index]
        self.rows[req_index] = row + new[0]


class StandIn:
    """Makes the calls of vLLM's V2 runner in its order; `log` records a step's calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.block_tables = Tables()
        self.req_states = SimpleNamespace(req_id_to_index={})

    def finish_requests(self, _output: Any) -> None:
        self.log.append("finish")

    def add_requests(self, output: Any) -> None:
        for request in output.scheduled_new_reqs:
            index = self.req_states.req_id_to_index.setdefault(request.req_id, 0)
            self.block_tables.append_block_ids(index, request.block_ids, True)

    def update_requests(self, output: Any) -> None:
        self.log.append("update")
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None:
                index = self.req_states.req_id_to_index[request_id]
                self.block_tables.append_block_ids(index, new, False)

    def gather_batch_req_state(self, _output: Any, _dummy_run: bool) -> tuple[None, int]:
        return None, 1

    def prepare_attn(self, _batch: Any) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        self.log.append("attn")
        return (torch.zeros(1, 8, dtype=torch.int32),), torch.full((1, 4), 999)

    def execute_model(self, output: Any, batch: Any = None) -> None:
        self.finish_requests(output)
        self.add_requests(output)
        self.update_requests(output)
        self.uniform = self.gather_batch_req_state(output, False)[1]
        if batch is not None:
            self.slots = self.prepare_attn(batch)[1]
            self.step = steps.current()
            self.log.append("forward")

    def sample_tokens(self, _grammar: Any) -> Any:
        self.log.append("sample")
        inner = SimpleNamespace()
        return SimpleNamespace(model_runner_output=inner, get_output=lambda: inner)


class Runner(VTokenV2Mixin, StandIn):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        memory = torch.randn(2, BLOCKS, S, 2, 8)
        self.memory = memory
        half = DeviceExecutor(
            [m.permute(0, 2, 1, 3) for m in memory], 2, torch.device("cpu"), ranks=Ranks()
        )
        self.vtoken_device, self.vtoken_blocks = half, {}
        stages = half.copies.stages
        for name in ("begin", "guard", "forward_ended"):
            self._note(stages, name)

    def _note(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def noted(*args: Any) -> Any:
            self.log.append(name)
            return inner(*args)

        setattr(owner, name, noted)


def message(plan: StepPlan | None, **changes: Any) -> Any:
    empty = SimpleNamespace(req_ids=[], new_block_ids=[])
    fields = {
        "vtoken": plan,
        "finished_req_ids": set(),
        "preempted_req_ids": None,
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": empty,
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
    }
    return SimpleNamespace(**fields | changes)


def batch(num_new: int, num_computed: int) -> Any:
    return SimpleNamespace(
        req_ids=["a"],
        query_start_loc_np=np.array([0, num_new]),
        num_computed_tokens_np=np.array([num_computed]),
        seq_lens=torch.tensor([num_computed + num_new]),
    )


def admitted() -> Runner:
    """A runner that has computed the 10 tokens of a prompt in blocks 5, 2, 7."""
    runner = Runner()
    new = SimpleNamespace(req_id="a", block_ids=([5, 2, 7],))
    runner.execute_model(message(StepPlan(1), scheduled_new_reqs=[new]), batch(10, 0))
    runner.log.clear()
    return runner


def evicting(*, dense: bool) -> StepPlan:
    """Tokens 1..3 die and 8, 9 move behind token 7 or into its holes; block 7 is returned."""
    part = RequestStep(10, evicted=np.array([1, 2, 3]), blocks=[5, 2], num_live=8, dense=dense)
    part.moved_ids, part.moved_slots = np.array([8, 9]), np.array([5 * S + 1, 5 * S + 2])
    part.new_slots = np.array([5 * S + 3])
    return StepPlan(
        2,
        source_slots=np.array([7 * S, 7 * S + 1]),
        destination_slots=part.moved_slots,
        requests=steps_of({"a": part}),
    )


def decode(runner: Runner, plan: StepPlan, **changes: Any) -> Any:
    cached = SimpleNamespace(req_ids=["a"], new_block_ids=[None])
    given = batch(1, 10)
    runner.execute_model(message(plan, scheduled_cached_reqs=cached, **changes), given)
    return given


def test_v2_copies_before_its_blocks_change_and_guards_before_the_forward() -> None:
    runner = admitted()
    before = runner.memory.clone()
    decode(runner, evicting(dense=True))
    assert runner.log == ["finish", "begin", "update", "attn", "guard", "forward", "forward_ended"]
    assert torch.equal(runner.memory[:, 5, 1:3], before[:, 7, 0:2])
    assert runner.block_tables.rows[0] == [5, 2]
    assert runner.slots[0, 0] == 5 * S + 3


def test_v2_waits_for_the_copies_before_vllm_itself_writes_blocks() -> None:
    runner = admitted()
    decode(runner, evicting(dense=True), new_block_ids_to_zero=[7])
    assert runner.log.index("guard") < runner.log.index("update")


def test_v2_gives_attention_physical_lengths_and_leaves_the_samplers_logical_ones() -> None:
    runner = admitted()
    given = decode(runner, evicting(dense=True))
    assert runner.step is not None
    assert runner.step.physical.seq_lens.tolist() == [8]
    assert given.seq_lens.tolist() == [11]
    assert not runner.step.has_holes
    assert runner.uniform == 1


def test_v2_leaves_full_graphs_only_in_a_step_with_holes() -> None:
    runner = admitted()
    plan = evicting(dense=False)
    decode(runner, plan)
    assert runner.uniform is None
    assert runner.step is not None
    assert runner.step.physical.with_holes.index.tolist() == [0]
    full = BatchExecutionDescriptor(CUDAGraphMode.FULL, 1, 1, uniform_token_count=1)
    piecewise = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 1, None)
    assert _is_compatible(full, 1, 1, 1, 0, None, 1)
    assert not _is_compatible(full, 1, 1, runner.uniform, 0, None, 1)
    assert _is_compatible(piecewise, 1, 1, runner.uniform, 0, None, 1)


def test_v2_appends_what_vllm_allocates_behind_the_replaced_row() -> None:
    runner = admitted()
    plan = evicting(dense=True)
    plan.requests.new_slots = Ragged.joined([[9 * S]])
    cached = SimpleNamespace(req_ids=["a"], new_block_ids=[([9],)])
    runner.execute_model(message(plan, scheduled_cached_reqs=cached), batch(1, 10))
    assert runner.block_tables.rows[0] == runner.vtoken_blocks["a"] == [5, 2, 9]


def test_v2_attaches_the_report_to_the_asynchronous_output_and_clears_the_step() -> None:
    runner = admitted()
    decode(runner, evicting(dense=True))
    report = runner.sample_tokens(None).model_runner_output.vtoken
    assert (report.step, report.moved_tokens) == (2, 2)
    assert steps.current() is None


def test_v2_reports_signals_of_the_step_launched_before_sampling() -> None:
    """Signals include the newest token, whose K the forward wrote; the report is attached to the
    tokens. The next step's copies wait for the end of the read, because they may overwrite victims.
    """
    runner = admitted()
    plan, signal = evicting(dense=True), Signal("key_norm", layers=(1,))
    plan.want_scores, plan.signals = (("a", signal),), {"a": (signal,)}
    assert runner.vtoken_device is not None
    runner._note(runner.vtoken_device.executor._scores, "finish")
    decode(runner, plan)
    sent = runner.sample_tokens(None)
    assert runner.log[-4:] == ["forward", "finish", "forward_ended", "sample"]
    report = sent.get_output().vtoken
    slots = {0: 5 * S, **{4 + i: 2 * S + i for i in range(4)}}
    slots |= {8: 5 * S + 1, 9: 5 * S + 2, 10: 5 * S + 3}
    rows = runner.memory[1].flatten(0, 1)[..., :4]
    expected = np.zeros(11, dtype=np.float32)
    for token, slot in slots.items():
        expected[token] = -float(rows[slot].norm(dim=-1).mean())
    np.testing.assert_allclose(report.scores["a", signal], expected, rtol=1e-6)


@pytest.mark.parametrize("probes", [False, True], ids=["no probe", "a probe"])
def test_v2_leaves_full_graphs_in_a_dense_step_that_probes(probes: bool) -> None:
    runner = admitted()
    plan, signal = evicting(dense=True), Signal("attention_sum", layers=(0,))
    plan.signals = {"a": (signal,)}
    plan.probed = frozenset("a" if probes else ())
    decode(runner, plan)
    assert runner.step is not None
    assert (runner.step.probe is not None) == probes
    assert (runner.uniform is None) == probes


def test_v2_drops_finished_and_preempted_requests() -> None:
    for reason in ("finished_req_ids", "preempted_req_ids"):
        runner = admitted()
        decode(runner, evicting(dense=False))
        half = runner.vtoken_device
        assert half is not None
        assert half.executor.mirrors
        runner.execute_model(message(StepPlan(3), **{reason: {"a"}}))
        assert not half.executor.mirrors
        assert not runner.vtoken_blocks
        assert int((half.pages._uploads.resident >= 0).sum()) == 0


def test_v1_is_no_uniform_decode_in_a_step_with_holes() -> None:
    class Base:
        def _determine_batch_execution_and_padding(self, **kwargs: Any) -> bool:
            force = kwargs.get("force_uniform_decode")
            return GPUModelRunner._is_uniform_decode(1, 1, 4, 4, force)

    class V1(GuardedRunnerMixin, Base):
        pass

    runner = V1()
    assert runner._determine_batch_execution_and_padding()
    for leaves in (False, True):
        runner.vtoken_device = SimpleNamespace(leaves_full_graphs=leaves)  # type: ignore[assignment]
        assert runner._determine_batch_execution_and_padding() is not leaves


def test_this_vllm_has_every_touch_point_of_both_runners() -> None:
    assert register.differences("cuda") == []
    targets = [point.target for point in register.TOUCH_POINTS if point.device == "cuda"]
    assert any("worker.gpu.model_runner" in target for target in targets)
    assert any("worker.gpu_model_runner" in target for target in targets)


def test_the_processor_of_request_arguments_refuses_under_v2_too() -> None:
    from vllm.v1.worker.gpu.sample.logits_processor.loader import (
        build_custom_logits_processors_params_validator,
    )

    name = "vtoken.vllm.engine.request_arguments:RequestArguments"
    validate = build_custom_logits_processors_params_validator([name])
    validate(SimpleNamespace(extra_args={"vtoken_budget_tokens": 64}))
    with pytest.raises(VLLMValidationError, match="allowed"):
        validate(SimpleNamespace(extra_args={"vtoken_budget_tokens": -1}))


def configuration(
    mode: str = "FULL_AND_PIECEWISE", *, ubatching: bool = False, sleeps: bool = False
) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=True,
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
    )


def refused(config: Any, *, experimental: bool) -> list[str]:
    rules = cuda_rules(config, experimental=experimental)
    return [reason for broken, reason in rules if broken]


def test_cuda_and_its_default_runner_are_refused_without_the_opt_in() -> None:
    assert refused(configuration(), experimental=False) == [
        f"CUDA: {OPT_IN}",
        f"model runner V2: {OPT_IN}",
    ]
    assert "never run on a GPU" in OPT_IN
    assert refused(configuration(), experimental=True) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (configuration("FULL"), "cudagraph mode FULL"),
        (configuration(ubatching=True), "microbatching"),
        (configuration(sleeps=True), "sleep mode: "),
    ],
)
def test_the_opt_in_does_not_allow_everything(config: Any, reason: str) -> None:
    assert [why.startswith(reason) for why in refused(config, experimental=True)] == [True]


def layer(**impl: Any) -> Any:
    cache = torch.zeros(BLOCKS, S, 2, 8).permute(0, 2, 1, 3)
    return SimpleNamespace(impl=SimpleNamespace(**impl), kv_cache=cache)


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ({}, "use --attention-backend FLASH_ATTN"),
        ({"vtoken_paged_impl": True, "vllm_flash_attn_version": 2}, "FlashAttention 2 needs pages"),
        ({"vtoken_paged_impl": True, "use_td": True}, "unset VLLM_TRITON_USE_TD"),
    ],
)
def test_a_backend_that_cannot_read_single_slots_is_refused_by_name(
    impl: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        check_layers({"layer 0": layer(**impl)}, configuration().compilation_config)
    check_layers({"layer 0": layer(vtoken_paged_impl=True)}, configuration().compilation_config)
