"""Runs vToken's CUDA worker on the CPU, with Triton's kernels in Triton's interpreter.

    python -m tests.support.interpreted MODEL [WINDOWED]

prints one JSON document: `attention`, vLLM's kernel at page size 1, `played`, SCENARIOS on an
engine with MODEL, `windowed`, WITH_WINDOWS on one with that model, and `mistakes`, the tokens of
one scenario with mistakes that only a captured graph shows.

It needs its own process, because importing Triton selects the interpreter; vLLM, which disables
Triton on a CPU, is patched to keep it. What runs: vLLM's Model Runner V2 (its subclass for CPUs,
which replaces streams, events, pinned memory and UVA), with asynchronous scheduling as on a GPU;
every Triton kernel of V2, of its sampler and of vLLM's Triton attention; vToken's mixin, executor,
page tables, and its kernels. No kernel is replaced. Decodes run in V2's full graphs, as far as that
is Python (`replayed`). What does not run: CUDA, streams, graphs, and the execution of kernels on a
GPU.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vtoken_bench.vllm.without_gpu import (
    ENVIRONMENT,
    attend_with_triton,
    keep_triton,
    use_triton,
)

if __name__ == "__main__":
    os.environ |= ENVIRONMENT

import torch

from tests.support.heap import freeze_heap, frozen_heap
from tests.support.observe import runtime_of, watch_victims
from vtoken_bench.vllm.steps_overlap import async_scheduling

NUM_NEW = 6
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 96,
    "block_size": 16,
    "num_gpu_blocks_override": 8,
    "kv_cache_memory_bytes": 1 << 20,
    "max_num_batched_tokens": 32,
    "skip_tokenizer_init": True,
    "seed": 0,
}
SHORT, LONG = list(range(7, 20)), list(range(5, 45))  # the second evicts at once
GROWING = list(range(3, 49))  # its third new token is the first of a block
FILLING = list(range(3, 33))  # alike; holes of its last block, which has no hash yet, are free
NAIVE: dict[str, Any] = {
    "policy": {"name": "streaming_llm", "params": {}},
    "budget_tokens": 24,
    "evict_when": "always",
    "interval_tokens": 4,
    "evict_during": "decode",
    "reclamation": "off",
    "recycle": False,
    "theta_f": 0.25,
    "low_watermark_blocks": 2,
    "experiment": {"round_rule": "price"},
    "shadow": None,
    "probe": {"layers": [0, 1]},
}
EAGER = NAIVE | {
    "reclamation": "auto",
    "theta_f": 0.0,
    "low_watermark_blocks": 8,
}
RECYCLING = NAIVE | {"reclamation": "paused", "recycle": True, "budget_tokens": 8}
READING = EAGER | {  # the policy reads attention, its shadow keys; both layers count
    "policy": {"name": "h2o", "params": {}},
    "shadow": {"name": "keydiff", "params": {"recent": 1, "heads": "mean", "pool_radius": 0}},
    "interval_tokens": 1,
}
PARKING = EAGER | {  # the first request gives for the others, and gets it back when they end
    "budget_tokens": 8,
    "interval_tokens": 1,
    "evict_when": "pressure",
    "low_watermark_blocks": 0,
    "headroom_blocks": 0,
    "park_bytes": 1 << 24,
    "restore_after_ms": 0,
}
# name -> configuration, and groups of prompts that run together; the prefix cache starts empty
SCENARIOS: dict[str, tuple[dict[str, Any], list[list[list[int]]]]] = {
    "dense": (NAIVE | {"policy": {"name": "none", "params": {}}}, [[LONG, SHORT]]),
    "holes": (NAIVE, [[LONG, SHORT]]),
    "relocated": (EAGER, [[LONG, SHORT]]),
    "recycled": (RECYCLING, [[FILLING, SHORT]]),
    "signals": (READING, [[LONG, SHORT]]),
    "default layers": (READING | {"probe": {"layers": []}}, [[LONG, SHORT]]),  # of full graphs
    "prefix hits": (EAGER, [[LONG], [LONG, SHORT]]),
    "chunks": (EAGER | {"evict_during": "both"}, [[LONG]]),
    "preempted": (NAIVE, [[GROWING[i:] + GROWING[:i] for i in range(3)]]),
    "parked": (PARKING, [[LONG, SHORT, GROWING]]),
    "swapped": (
        NAIVE | {"park_bytes": 1 << 24},
        [[GROWING[i:] + GROWING[:i] for i in range(3)]],
    ),
}
NUM_NEW_OF = {"parked": [12, 3, 3]}  # by prompt, where it is not `NUM_NEW`
WITH_MISTAKES = "holes"
WINDOWED = ENGINE | {"num_gpu_blocks_override": 16}  # both groups need a request's blocks
ONE_LAYER = {"low_watermark_blocks": 16, "probe": {"layers": [0]}}
WITH_WINDOWS = {
    "holes": (NAIVE | ONE_LAYER, [[LONG, SHORT]]),
    "relocated": (EAGER | ONE_LAYER, [[LONG, SHORT]]),
}


def spare_interpreter() -> None:
    """Leave out what Triton's interpreter computes and never uses: two thirds of a kernel's time.

    Without `debug` it drops the conditions of integer overflow that it has computed, and each call
    of a function in a kernel goes over all names of `triton.language` for the same few.
    """
    import inspect

    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


class Memory:
    """A random cache in vLLM's layout, and attention over it by vLLM's Triton kernel."""

    blocks, size, heads, dim, query_heads = 24, 16, 2, 32, 4

    def __init__(self) -> None:
        torch.manual_seed(0)
        memory = torch.randn(self.blocks, self.size, self.heads, 2 * self.dim)
        self.cache = memory.permute(0, 2, 1, 3)

    def attend(
        self, cache: torch.Tensor, table: torch.Tensor, lens: list[int], query: torch.Tensor
    ) -> torch.Tensor:
        """One query a request: `query` [R, Hq, D]; `cache` at page size S or 1."""
        from vtoken_bench.checks.pages import triton_attention

        prepare = triton_attention()
        assert prepare is not None
        return prepare(query, cache, table, torch.tensor(lens, dtype=torch.int32))()

    def oracle(self, slots: list[torch.Tensor], query: torch.Tensor) -> torch.Tensor:
        rows = self.cache.transpose(1, 2).reshape(-1, self.heads, 2 * self.dim)
        groups = self.query_heads // self.heads
        out = []
        for q, live in zip(query, slots, strict=True):
            k, v = rows[live].repeat_interleave(groups, dim=1).split(self.dim, dim=-1)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q, k) * self.dim**-0.5, dim=-1)
            out.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(out)


def attention() -> dict[str, Any]:
    """vLLM's Triton kernel at page size 1: against the oracle, against size S, after relocation."""
    from vtoken.vllm.cuda.layout import page_view

    memory = Memory()
    query = torch.randn(3, memory.query_heads, memory.dim)
    order = torch.randperm(memory.blocks * memory.size)
    scattered = [order[:70], order[70:71], order[71:200]]
    elsewhere = [order[200:270], order[270:271]]
    lens = [len(part) for part in scattered]

    def pages(parts: list[torch.Tensor]) -> torch.Tensor:
        table = torch.zeros(len(parts), max(map(len, parts)), dtype=torch.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(part)] = part
        return table

    got = memory.attend(page_view(memory.cache), pages(scattered), lens, query)
    wrong = pages(scattered)
    wrong[0, 3] = wrong[0, 4]  # the control: one slot of one request read twice
    damaged = memory.attend(page_view(memory.cache), wrong, lens, query)
    oracle = memory.oracle(scattered, query)

    moved = memory.cache.clone(memory_format=torch.preserve_format)
    for source, target in zip(scattered[:2], elsewhere, strict=True):
        page_view(moved)[target] = page_view(memory.cache)[source]
    again = memory.attend(page_view(moved), pages(elsewhere), lens[:2], query[:2])

    blocks = torch.randperm(memory.blocks)[:9].to(torch.int32).view(3, 3)
    dense = memory.attend(memory.cache, blocks, [48, 5, 33], query)
    offsets = torch.arange(memory.size, dtype=torch.int32)
    expanded = (blocks[:, :, None] * memory.size + offsets).reshape(3, -1).contiguous()
    same = memory.attend(page_view(memory.cache), expanded, [48, 5, 33], query)
    return {
        "max_error": float((got - oracle).abs().max()),
        "max_error_damaged": float((damaged - oracle).abs().max()),
        "equal_when_moved": torch.equal(got[:2], again),
        "equal_to_block_size": torch.equal(dense, same),
    }


def play(llm: Any, scenarios: Any, holes: list[int] | None = None) -> dict[str, dict[str, Any]]:
    """Run `scenarios` on one engine: tokens, victims and counts of what ran, by name.

    `holes` grows by an entry for each step with holes.
    """
    from vllm import SamplingParams

    from vtoken.wire.commands import Command, PatchConfig

    runtime = runtime_of(llm)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found = {}
    for name, (patch, groups) in scenarios.items():
        for _ in range(3 if name == "swapped" else 0):
            runtime.prices.prefills.add(1e6, 1)  # dearer than copies on any device
        assert scheduler.reset_prefix_cache()
        reply = scheduler.vtoken_controller.handle(Command(call=PatchConfig(patch=patch)))
        assert reply.problem is None, reply.problem
        victims: list[tuple[int, list[int]]] = []

        def note(table: Any, picked: Any, victims: Any = victims) -> None:
            if picked is not None:
                victims.append((table.num_tokens, sorted(picked.tolist())))

        unwatch = watch_victims(runtime, note)
        before, steps = _counts(runtime), len(holes or ())
        outputs = [
            output
            for prompts in groups
            for output in llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [
                    SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                    for count in NUM_NEW_OF.get(name, [NUM_NEW] * len(prompts))
                ],
                use_tqdm=False,
            )
        ]
        unwatch()
        shadow = runtime.shadow.document()
        found[name] = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "victims": [list(died) for died in sorted(victims)],
            "shadow": None if shadow is None else [shadow.compared, shadow.agreed],
            "steps_with_holes": len(holes or ()) - steps,
            **{fact: number - before[fact] for fact, number in _counts(runtime).items()},
        }
    return found


def _counts(runtime: Any) -> dict[str, int]:
    counters = runtime.counters
    return {
        "moved_tokens": counters.reclamation.moved_tokens,
        "parked_tokens": counters.parking.copied_tokens,
        "swapped_requests": counters.parking.swapped_requests,
        "restored_tokens": counters.parking.restored_tokens,
        "recycled_slots": counters.reclamation.recycled_slots,
        "preempted": counters.requests.preempted,
        "verified": counters.invariants.verified_relocations,
        "violations": counters.invariants.violations,
    }


def played(model: str, settings: dict[str, Any], scenarios: Any) -> dict[str, Any]:
    """`scenarios` on an engine with `model` on the CUDA worker, and what ran in it."""
    from vllm import LLM, SamplingParams

    from vtoken import vllm as plugin
    from vtoken.vllm.cuda.inputs import StepInputs
    from vtoken.vllm.cuda.signals import probe_kernels
    from vtoken_bench.forcing import ARGUMENT, PROCESSOR

    holes: list[int] = []
    put = StepInputs.put

    def noted_put(self: Any, step: Any, *rest: Any) -> None:
        if step is not None and len(step.with_holes):
            holes.append(1)
            if STEPS:  # else the self-test
                STEPS[-1]["holes"] = True
        put(self, step, *rest)

    StepInputs.put = noted_put  # type: ignore[method-assign]
    singles: list[int] = []
    scores = probe_kernels.probe_scores
    probe_kernels.probe_scores = lambda *a, **k: (singles.append(1), scores(*a, **k))  # type: ignore[assignment]
    args = plugin.engine_args({"verify_ratio": 1.0}, check_every_step=True)
    STEPS.clear()
    args["logits_processors"] = [PROCESSOR]
    llm = LLM(model, **settings, **args | {"worker_cls": f"{__name__}.Worker"})
    core = llm.llm_engine.engine_core.engine_core
    found = {"scenarios": play(llm, scenarios, holes)}
    forced = SamplingParams(
        temperature=0, max_tokens=4, logprobs=1, extra_args={ARGUMENT: [9, 8, 7]}
    )
    (output,) = llm.generate([{"prompt_token_ids": LONG}], forced, use_tqdm=False)
    chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    found["forced"] = [[token, likely[token].logprob] for token, likely in chosen]
    runner = core.model_executor.driver_worker.worker.model_runner
    found["runner"] = [f"{cls.__module__}.{cls.__name__}" for cls in type(runner).__mro__]
    found["scheduled_asynchronously"] = core.batch_queue is not None
    found["groups"] = len(runner.kv_cache_config.kv_cache_groups)
    found["probed_singles"] = len(singles)
    found["steps"] = [*STEPS]
    found["known_requests"] = len(runner.vtoken_blocks)
    core.shutdown()
    StepInputs.put, probe_kernels.probe_scores = put, scores  # type: ignore[method-assign]
    return found


STEPS: list[dict[str, Any]] = []  # of the engine: calls in their order, and what picks the graph


def noted(function: Any, name: str, *, after: bool = False) -> Any:
    """`function`, whose call is noted when it begins, or when it ends."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if STEPS and not after:
            STEPS[-1]["calls"].append(name)
        result = function(*args, **kwargs)
        if after:
            STEPS[-1]["calls"].append(name)
        return result

    return call


def install() -> None:
    """Make vLLM's CPU worker run V2 with vToken's mixin, and attention by vLLM's Triton kernels."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.worker.cpu_worker import CPUWorker

    from tests.support import replayed

    class Worker(CPUWorker):
        def init_device(self) -> None:
            replayed.choose_graphs(self.vllm_config.compilation_config)
            super().init_device()
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner

            from vtoken.vllm.cuda.runner import VTokenV2Mixin

            class Noted(CPUModelRunner):
                """vLLM's own methods, noted in `STEPS[-1]["calls"]`."""

            for name in ("finish_requests", "update_requests", "prepare_attn", "sample_tokens"):
                setattr(Noted, name, noted(getattr(CPUModelRunner, name), name))
            Noted.execute_model = noted(CPUModelRunner.execute_model, "forward", after=True)

            class Runner(VTokenV2Mixin, Noted):
                def _vtoken_executor(self, layers: dict[str, Any]) -> Any:
                    half = use_triton(super()._vtoken_executor(layers))
                    for name in ("launch", "guard", "forward_ended"):
                        stages = half.copies.stages
                        setattr(stages, name, noted(getattr(stages, name), name))
                    return half

                def gather_batch_req_state(self, output: Any, dummy_run: bool) -> Any:
                    state, uniform = super().gather_batch_req_state(output, dummy_run)
                    plan = self.vtoken_device.executor.plan
                    STEPS[-1] |= {
                        "uniform": uniform,
                        "leaves": self.vtoken_device.leaves_full_graphs,
                        "probed": bool(plan is not None and plan.probed),
                    }
                    return state, uniform

                def execute_model(self, *args: Any, **kwargs: Any) -> Any:
                    STEPS.append({"calls": []})
                    return super().execute_model(*args, **kwargs)

            self.model_runner.__class__ = Runner

        def compile_or_warm_up_model(self) -> Any:
            replayed.capture(self.model_runner, lambda: STEPS[-1].update(replayed=True))
            return super().compile_or_warm_up_model()

    replayed.no_graph_pool()
    attend_with_triton()
    triton_attn.NUM_PAR_SOFTMAX_SEGMENTS = 2  # of one query; each takes as long as 16 on a GPU
    sys.modules[__name__].Worker = Worker  # type: ignore[attr-defined]


def mistaken(model: str, name: str) -> list[list[int]]:
    """The tokens of `WITH_MISTAKES` on an engine that makes a mistake of `replayed.MISTAKES`."""
    from tests.support import replayed

    scenario = {WITH_MISTAKES: SCENARIOS[WITH_MISTAKES]}
    with replayed.MISTAKES[name]():
        tokens: list[list[int]] = played(model, ENGINE, scenario)["scenarios"][WITH_MISTAKES][
            "tokens"
        ]
    return tokens


def main() -> None:
    keep_triton()
    from tests.support import replayed

    spare_interpreter()
    install()
    document: dict[str, Any] = {"attention": attention()}
    freeze_heap()
    with frozen_heap(), async_scheduling():
        document["played"] = played(sys.argv[1], ENGINE, SCENARIOS)
        for windowed in sys.argv[2:]:
            document["windowed"] = played(windowed, WINDOWED, WITH_WINDOWS)
        document["mistakes"] = {name: mistaken(sys.argv[1], name) for name in replayed.MISTAKES}
    print("\n" + json.dumps(document))


if __name__ == "__main__":
    sys.modules["tests.support.interpreted"] = sys.modules[__name__]
    __name__ = "tests.support.interpreted"  # vLLM imports the worker by this name
    main()
