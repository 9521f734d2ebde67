"""What vToken's own code has a device do in a step of 30 decoding requests, within budgets.

Plans are those of the core. vToken's half of Model Runner V2, its metadata builder and its
attention run on a device without memory (torch's `meta`) around methods of vLLM that do nothing; so
whatever is counted is vToken's. Views and empty tensors launch nothing and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.vllm.cuda.backends import PagedImplMixin, PhysicalBuilderMixin
from vtoken.vllm.cuda.copies.streams import Streams
from vtoken.vllm.cuda.device_executor import DeviceExecutor
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.runner import VTokenV2Mixin
from vtoken.vllm.cuda.signals.layers import AttentionLayer, layers_in_graphs
from vtoken.vllm.spec import VTokenAttentionSpec
from vtoken.vllm.worker.ranks import Ranks
from vtoken_bench.decoding import BLOCK_SIZE, HEAD_SIZE, KV_HEADS, LAYERS, Calls, Decoding
from vtoken_bench.vllm.counted import NO_WORK
from vtoken_bench.vllm.without_gpu import use_triton

pytestmark = pytest.mark.vllm

DEVICE = torch.device("meta")
REQUESTS, TOKENS, STEPS, MAX_LENGTH = 30, 192, 70, 2048
HEADS = 32
KEEP = {"budget_tokens": 128, "interval_tokens": 32}
BACK = 10
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_SIZE * 4  # of a token in float32, in all layers


class Work(NamedTuple):
    launches: int = 0  # of Triton's kernels
    uploads: int = 0
    downloads: int = 0
    ops: int = 0  # of torch

    @classmethod
    def most(cls, steps: list[Work]) -> Work:
        """The most of each kind in any of the steps."""
        return cls(*map(max, zip(*steps, strict=True)))

    def within(self, limit: Work) -> bool:
        return all(own <= most for own, most in zip(self, limit, strict=True))


# By policy, the most that a step may do: a steady one, in which no token dies or moves and no score
# is due, and any other. Here all requests are due at once. The first step uploads what stays, and
# makes an accumulator for each request. Room for the sums of dead tokens grows by two operations.
LIMITS = {
    "fixed": (Work(1, 1), Work(4, uploads=2, downloads=1, ops=1)),
    "pressure": (Work(1, 1), Work(4, uploads=2, downloads=1, ops=1)),
    "h2o": (Work(5, 1, ops=1), Work(7, uploads=2, downloads=1, ops=62)),
    "streaming": (Work(1, 1), Work(1, 1)),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fixed": KEEP | {"policy": {"name": "keydiff"}},
    "pressure": KEEP
    | {
        "policy": {"name": "keydiff"},
        "evict_when": "pressure",
        "low_watermark_blocks": 400,  # of 841: memory is short from step 30 on
        "headroom_blocks": 400,
    },
    "h2o": KEEP | {"policy": {"name": "h2o"}},
    "streaming": KEEP | {"policy": {"name": "streaming_llm"}},
}


@triton.jit
def _nothing_kernel() -> None:
    pass


class Device(TorchDispatchMode):
    """Counts what is launched on `DEVICE`; without memory, a download leaves garbage.

    `floats`: the bytes of floating point that were uploaded and downloaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.floats: Counter[str] = Counter()

    def take(self) -> Work:
        """What was launched since the last call."""
        found, self.found = self.found, Counter()
        return Work(**found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        name = func.overloadpacket.__name__
        if name == "_pin_memory":
            return args[0]
        if name in ("copy_", "_to_copy"):
            source = args[-1 if name == "_to_copy" else 1].device.type
            target = kwargs["device"] if kwargs.get("device") else args[0].device
            size = args[0].nbytes if args[0].is_floating_point() else 0
            if (source, target.type) == ("cpu", "meta"):
                self.found["uploads"] += 1
                self.floats["uploads"] += size
                return func(*args, **kwargs)
            if (source, target.type) == ("meta", "cpu"):
                self.found["downloads"] += 1
                self.floats["downloads"] += size
                return args[0] if name == "copy_" else torch.empty_like(args[0], device="cpu")
        if name not in NO_WORK:
            self.found["ops"] += 1
        return func(*args, **kwargs)


class Builder:
    """vLLM's metadata builder, as far as vToken's uses it."""

    block_size = BLOCK_SIZE

    def __init__(self, spec: Any, *_: Any) -> None:
        self.kv_cache_spec = spec

    def build(self, *_: Any) -> Any:
        return SimpleNamespace()


class PagedBuilder(PhysicalBuilderMixin, Builder):
    pass


class Attention:
    num_heads, scale, logits_soft_cap, sinks = HEADS, 0.1, None, None

    def forward(self, *args: Any) -> Any:
        return args[6]


class PagedAttention(PagedImplMixin, Attention):
    def __init__(self, layer: int) -> None:
        self.vtoken_layer = layer


class V2:
    """vLLM's Model Runner V2: the order of its step, and nothing of its work."""

    def finish_requests(self, _: Any) -> None: ...

    def add_requests(self, _: Any) -> None: ...

    def update_requests(self, _: Any) -> None: ...

    def gather_batch_req_state(self, *_: Any) -> Any:
        return None, 1

    def prepare_attn(self, _: Any) -> Any:
        return (self.block_table,), (self.slot_mapping,)

    def execute_model(self: Any, scheduler_output: Any) -> None:
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        self.update_requests(scheduler_output)
        _, uniform = self.gather_batch_req_state(scheduler_output, dummy_run=False)
        self.vtoken_blocks = {name: list(blocks) for name, blocks in self.tables.items()}
        batch = scheduler_output.batch
        (block_table,), (slot_mapping,) = self.prepare_attn(batch)
        starts = torch.from_numpy(batch.query_start_loc_np)
        common = CommonAttentionMetadata(
            starts,
            starts,
            self.seq_lens,
            num_reqs=REQUESTS,
            num_actual_tokens=REQUESTS,
            max_query_len=1,
            max_seq_len=int(batch.seq_lens_cpu_upper_bound.numpy().max()),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
        )
        metadata = self.builder.build(0, common)
        if uniform is None:  # a replayed graph runs no Python
            for layer, cache in zip(self.layers, self.caches, strict=True):
                layer.forward(layer, self.query, None, None, cache, metadata, self.query)

    def sample_tokens(self, _: Any) -> Any:
        return SimpleNamespace(vtoken=None)


class Runner(VTokenV2Mixin, V2):
    """vToken's runner for the requests whose blocks are `tables`, on `DEVICE`."""

    def __init__(self, tables: dict[str, list[int]], num_blocks: int) -> None:
        self.tables = tables
        shape = (num_blocks, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)
        self.caches = [torch.empty(shape, device=DEVICE).permute(0, 2, 1, 3) for _ in range(LAYERS)]
        self.vtoken_tables = PageTables(REQUESTS, MAX_LENGTH, DEVICE)
        self.layers = [PagedAttention(layer) for layer in range(LAYERS)]
        for layer, cache in zip(self.layers, self.caches, strict=True):
            layer.vtoken_signals = AttentionLayer.of(layer, cache)
        signals = [layer.vtoken_signals for layer in self.layers]
        for number in layers_in_graphs(LAYERS, {}):
            signals[number].hold(REQUESTS, torch.float32, in_graphs=True)
        half = DeviceExecutor(
            *(self.caches, signals, self.vtoken_tables), ranks=Ranks(), streams=Streams()
        )
        self.vtoken_device = use_triton(half)
        self.vtoken_group, self.kv_block_zeroer = SimpleNamespace(index=0), None
        self.block_tables = SimpleNamespace(
            block_tables=[SimpleNamespace(stage_write=lambda *_: None)],
            num_blocks=SimpleNamespace(np=np.zeros((1, REQUESTS), dtype=np.int32)),
        )
        self.req_states = SimpleNamespace(
            req_id_to_index={f"cmpl-{i:012x}-0": i for i in range(REQUESTS)}
        )
        spec = VTokenAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        self.builder = PagedBuilder(spec, [], None, DEVICE)
        self.builder.vtoken_tables = self.vtoken_tables
        self.query = torch.empty(REQUESTS, HEADS, HEAD_SIZE, device=DEVICE)
        self.seq_lens = torch.empty(REQUESTS, dtype=torch.int32, device=DEVICE)
        self.block_table = torch.empty(
            REQUESTS, MAX_LENGTH // BLOCK_SIZE, dtype=torch.int32, device=DEVICE
        )
        self.slot_mapping = torch.empty(REQUESTS, dtype=torch.int64, device=DEVICE)


class OnDevice(Calls):
    """The calls of a step, executed by a `Runner`; `steady` and `others`: the work of each step.

    `plans`: each step's plan, its work, and the bytes of floating point up and down.
    """

    def __init__(self, decoding: Decoding, device: Device) -> None:
        calls = decoding.calls
        super().__init__(calls.runtime, calls.store, calls.ids)
        self._device = device
        self._runner = Runner(self.store.tables, decoding.num_blocks)
        self._counts: dict[str, int] = {}
        self.steady: list[Work] = []
        self.others: list[Work] = []
        self.plans: list[tuple[Any, Work, tuple[int, int]]] = []

    def begin(self, ready: list[str]) -> None:
        self._runner.vtoken_blocks = {
            name: list(blocks) for name, blocks in self.store.tables.items()
        }
        super().begin(ready)

    def commit(self, counts: dict[str, int]) -> Any:
        self._counts = counts
        return super().commit(counts)

    def mirror(self, plan: Any) -> None:
        computed = np.array([self._counts[name] - 1 for name in self.ids])
        batch = SimpleNamespace(
            req_ids=self.ids,
            query_start_loc_np=np.arange(REQUESTS + 1),
            num_computed_tokens_np=computed,
            seq_lens=self._runner.seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + 1).int(),
        )
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=())
        output = SimpleNamespace(
            vtoken=plan,
            batch=batch,
            finished_req_ids=(),
            preempted_req_ids=(),
            scheduled_new_reqs=(),
            scheduled_cached_reqs=cached,
            new_block_ids_to_zero=(),
            kv_cache_block_copies=(),
        )
        self._device.take()
        self._device.floats.clear()
        with self._device:
            self._runner.execute_model(output)
            self._runner.sample_tokens(None)
        work, requests = self._device.take(), plan.requests
        changed = len(requests.evicted.values) or len(plan.source_slots) or plan.want_scores
        (self.others if changed else self.steady).append(work)
        floats = self._device.floats
        self.plans.append((plan, work, (floats["uploads"], floats["downloads"])))


def worked(
    policy: str,
    patch: pytest.MonkeyPatch,
    plant: Callable[[Runner], Any] | None = None,
    parking: dict[str, Any] | None = None,
) -> OnDevice:
    """The work of `STEPS` steps, and with settings of `parking` of `BACK` more, whose budget holds
    all tokens; `plant` is called in each, before vToken's methods.
    """
    device = Device()

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *_, **__: device.found.update(launches=1)

    patch.setattr(KernelInterface, "__getitem__", launch)
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # no driver to query
    if plant is not None:
        patch.setattr(V2, "finish_requests", lambda self, _: plant(self))
    scores = np.random.default_rng(0).random(TOKENS + 2 * STEPS, dtype=np.float32)
    decoding = Decoding(REQUESTS, TOKENS, {}, borrows_blocks=False, scores=scores)
    decoding.configure(CONFIGS[policy] | (parking or {}))
    calls = decoding.calls = OnDevice(decoding, device)
    decoding.steps(STEPS)
    if parking is not None:
        decoding.configure({"budget_tokens": MAX_LENGTH})
        decoding.steps(BACK)
    assert len(calls.steady) > len(calls.others) > 1
    return calls


@pytest.mark.parametrize("policy", CONFIGS)
def test_a_step_has_no_more_work_than_its_budget(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = worked(policy, monkeypatch)
    for steps, limit in zip((calls.steady, calls.others), LIMITS[policy], strict=True):
        most = Work.most(steps)
        assert most.within(limit), f"{most}, allowed {limit}"


def test_parked_tokens_cost_a_launch_an_index_and_each_of_their_bytes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host slots that follow one another are one transfer; other steps have no more work."""
    monkeypatch.setattr("vtoken.vllm.cuda.copies.host_slabs.MAX_BYTES", 1 << 31)
    monkeypatch.setattr("vtoken.vllm.cuda.copies.transit.MAX_BYTES", 1 << 30)
    with monkeypatch.context() as patch:
        plain = worked("fixed", patch)
    calls = worked("fixed", monkeypatch, parking={"park_bytes": 1 << 31, "restore_after_ms": 0})
    parked = restored = 0
    for (plan, work, (_, down)), (_, before, (_, reported)) in zip(
        calls.plans, plain.plans, strict=False
    ):
        num_parked = len(plan.park_slots)
        added = Work(launches=1, uploads=1, downloads=1) if num_parked else Work()
        assert work == Work(*map(sum, zip(before, added, strict=True)))
        assert down == reported + num_parked * ROW_BYTES
        parked += num_parked
    for plan, work, (up, _) in calls.plans:
        num_restored = len(plan.restore_slots)
        runs = 1 + np.count_nonzero(np.diff(np.sort(plan.restore_hosts)) != 1)
        assert up // ROW_BYTES == num_restored  # besides a few weights
        if num_restored:
            assert work == Work(
                launches=2, uploads=2 + runs
            )  # a launch and an upload of these are a steady step's
        restored += num_restored
    assert restored == parked > 1000


PLANTED: dict[str, Callable[[Runner], Any]] = {
    "launches": lambda _: _nothing_kernel[(1,)](),
    "uploads": lambda runner: runner.seq_lens.copy_(torch.ones(REQUESTS, dtype=torch.int32)),
    "downloads": lambda runner: torch.empty(REQUESTS, dtype=torch.int32).copy_(runner.seq_lens),
    "ops": lambda runner: runner.seq_lens.add_(1),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_control_one_more_in_each_step_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before = Work.most(worked("streaming", patch).steady)
    after = Work.most(worked("streaming", monkeypatch, PLANTED[kind]).steady)
    assert not after.within(before)
    assert getattr(after, kind) == getattr(before, kind) + 1
