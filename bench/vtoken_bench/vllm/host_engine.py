"""One engine whose host work is that of a GPU, for `vtoken bench host`.

Real: vLLM's engine in process, its asynchronous scheduler, Model Runner V2 and attention's Python;
vToken's scheduler, worker and metadata builders. Not run: Triton's kernels, the model beside its
attention, sampling. A step in a full graph runs no attention, as its replay runs no Python.

Import it after `vtoken_bench.vllm.without_gpu.keep_triton` alone.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from triton.runtime import interpreter
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from vtoken.vllm import engine_args
from vtoken.vllm.cuda.copies import transfer
from vtoken.vllm.cuda.runner import VTokenV2Mixin
from vtoken_bench.engines import prompt
from vtoken_bench.evaluation.variants import configuration
from vtoken_bench.vllm.counted import Counts
from vtoken_bench.vllm.cpu_time import CPUTime, Place
from vtoken_bench.vllm.without_gpu import attend_with_triton, use_triton

LAYERS, BLOCK_SIZE = 32, 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKEN = 33  # that every request gets


class Sampled(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.model_runner_output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.model_runner_output

    def get_kv_connector_output(self) -> None:
        """Abstract since vLLM 0.33."""


class StubModel:
    """Attention of all layers over zeros, without what is between them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._layers = runner.compilation_config.static_forward_context
        self._hidden = runner.model_config.get_hidden_size()

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        tokens = len(input_ids)
        if not self._runner.full_graph:
            impl = next(iter(self._layers.values())).impl
            query = torch.zeros(tokens, impl.num_heads, impl.head_size)
            key = torch.zeros(tokens, impl.num_kv_heads, impl.head_size)
            metadata, out = get_forward_context().attn_metadata, torch.zeros_like(query)
            for name, layer in self._layers.items():
                layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata[name], out)
        return torch.zeros(1, self._hidden).expand(tokens, self._hidden)

    def modules(self) -> Any:
        return iter(())


class StockRunner(CPUModelRunner):
    execute_model_state: Any

    def sample_tokens(self, _: Any) -> Any:
        state, self.execute_model_state = self.execute_model_state, None
        batch = state.input_batch
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={name: row for row, name in enumerate(batch.req_ids)},
            sampled_token_ids=[
                [TOKEN] if done else [] for done in (ends >= batch.prefill_len_np).tolist()
            ],
        )
        return Sampled(output)


class Runner(VTokenV2Mixin, StockRunner):
    """`decodes`: all requests of the step decode; `full_graph`: V2 may replay a full graph."""

    full_graph = decodes = False

    def _vtoken_executor(self, layers: dict[str, Any]) -> Any:
        half = use_triton(super()._vtoken_executor(layers))
        half.triton_probe = True  # vToken 0.3, beside which others are measured, needs it
        return half

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
        scheduled = scheduler_output.num_scheduled_tokens
        self.full_graph = uniform is not None
        self.decodes = scheduler_output.total_num_scheduled_tokens == len(scheduled)
        return state, uniform


class Worker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = Runner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.model_runner.model = StubModel(self.model_runner)
        return CompilationTimes(language_model=0.0, encoder=0.0)


class HostEngine:
    """The engine, for loads of `spec`: a `vtoken_bench.serving_check.Load`, and its `blocks`."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self.spec, self.blocks = spec, spec["blocks"]
        longest = spec["prompt_tokens"] + spec["new_tokens"] + 1
        (folder / "config.json").write_text(json.dumps(MODEL))
        args = engine_args({"policy": {"name": "none"}})
        args["worker_cls"] = f"{__name__}.Worker"
        attend_with_triton()
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                load_format="dummy",
                dtype="float32",
                enforce_eager=True,
                max_model_len=longest,
                block_size=BLOCK_SIZE,
                enable_prefix_caching=False,
                num_gpu_blocks_override=self.blocks + 1,
                kv_cache_memory_bytes=LAYERS * 2 * 16 * 4 * BLOCK_SIZE * (self.blocks + 1),
                max_num_seqs=spec["clients"],
                max_num_batched_tokens=8192,
                skip_tokenizer_init=True,
                seed=0,
                **args,
            )
        )
        core = self.engine.engine_core.engine_core
        assert core.batch_queue is not None  # asynchronous scheduling
        self.scheduler = core.scheduler
        self.scheduler.vtoken.shape.borrows_blocks = False  # as on CUDA
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.counts: Counts | None = None
        self._scores, self._scatters = torch.Generator(), True
        self._loads = 0
        self._spare_the_device()

    def _spare_the_device(self) -> None:
        """Run no kernel from now on; scores that would come from kernels are random, or equal."""

        def launch(kernel: Any, *_: Any, **__: Any) -> None:
            if self.counts is not None:
                self.counts.note("launches", kernel.fn.__name__)

        def download(tensor: torch.Tensor) -> torch.Tensor:
            found = fetch(tensor)
            if not found.is_floating_point():
                return found
            return found.uniform_(generator=self._scores) if self._scatters else found.zero_()

        interpreter.InterpretedFunction.run = launch
        send, fetch = transfer.upload, transfer.download
        for kind, old, new in (("uploads", send, send), ("downloads", fetch, download)):
            _replace(old, self._counted(kind, new))

    def _counted(self, kind: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts = self.counts
            return function(*args) if counts is None else counts.transfer(kind, function)(*args)

        return call

    def run(
        self, config: dict[str, Any], seed: int, *, count: bool, scatters: bool
    ) -> dict[str, Any]:
        """One load under `config`: CPU time by place, or with `count` what every step launched.

        CPU time is separate for steps in which all requests decode and for others. A prompt's
        tensors are large, so that operations of torch cost more here than their launches.
        `scatters`: victims lie anywhere; otherwise the oldest tokens die.
        """
        settings = configuration(config, self.blocks)
        self.scheduler.vtoken_controller.patch_config(settings, actor="bench")
        counters = self.scheduler.vtoken.counters
        rng, self._scatters = random.Random(seed), scatters
        self._scores.manual_seed(seed)
        self._loads += 1
        waiting = [prompt(rng, self.spec["prompt_tokens"]) for _ in range(self.spec["requests"])]
        for _ in range(self.spec["clients"]):
            self._add(waiting)
        preempted, running, steps = counters.requests.preempted, 0, []
        clock, self.counts = CPUTime(), Counts() if count else None
        spent: dict[str, Counter[Place]] = {"decode": Counter(), "mixed": Counter()}
        with self.counts or clock:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished and waiting:
                        self._add(waiting)
                running += len(self.scheduler.running)
                steps.append({"decodes": self.runner.decodes, "full": self.runner.full_graph})
                spent["decode" if self.runner.decodes else "mixed"].update(clock.take())
                if self.counts is not None:
                    found, self.counts.found = self.counts.found, Counter()
                    steps[-1]["counts"] = [[*key, number] for key, number in found.items()]
        self.counts = None
        decodes = [step for step in steps if step["decodes"]]
        result = {
            "steps": len(steps),
            "mean_running": running / len(steps),
            "decode_steps": len(decodes),
            "full_graph_steps": sum(step["full"] for step in decodes),
            "preemptions": counters.requests.preempted - preempted,
            "violations": counters.invariants.violations,
        }
        if count:
            return result | {"counted": steps}
        spent["mixed"].update(clock.take())  # after the last step
        ns = {kind: [[*where, ns] for where, ns in found.items()] for kind, found in spent.items()}
        return result | {"cpu_ns": clock.total_ns, "ns": ns}

    def _add(self, waiting: list[list[int]]) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=self.spec["new_tokens"], ignore_eos=True, detokenize=False
        )
        name = f"{self._loads}-{len(waiting)}"
        self.engine.add_request(name, {"prompt_token_ids": waiting.pop()}, params)


def _replace(old: Any, new: Any) -> None:
    """Put `new` wherever a module of vToken names the function `old`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vtoken."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
