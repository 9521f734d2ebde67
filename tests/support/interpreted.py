"""Runs vToken's CUDA worker on the CPU, with Triton's kernels in Triton's interpreter.

    python tests/support/interpreted.py MODEL CONFIG…

prints one JSON document: `attention`, vLLM's kernel at page size 1, `probe`, vToken's score kernel,
and `engines`, one engine a configuration (a merge patch as for `PATCH /vtoken/v1/config`).

It needs its own process, because importing Triton selects the interpreter; vLLM, which disables
Triton on a CPU, is patched to keep it. Tested: `DeviceExecutor`, page tables, metadata builder and
attention implementation, in vLLM's V1 runner and engine, with vLLM's own Triton attention kernel.
Not tested: CUDA, streams, graphs, and the execution of kernels on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
}

import torch

from tests.support.heap import freeze_heap, frozen_heap
from tests.support.observe import watch_victims

PROMPTS = [list(range(5, 45)), list(range(7, 20))]  # the first one evicts at once
NUM_NEW = 6
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "block_size": 16,
    "kv_cache_memory_bytes": 1 << 20,
    "seed": 0,
}


def keep_triton() -> None:
    import vllm.platforms as platforms

    assert platforms.current_platform.device_type == "cpu"
    platforms.vllm_version_matches_substr = lambda _: False  # "no Triton on the CPU build"
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # vLLM's cache kernel picks a size by it
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON


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
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        requests, heads, dim = query.shape
        key, value = cache.transpose(1, 2).split(dim, dim=-1)
        out = torch.zeros_like(query)
        scratch = torch.empty(requests, heads, 16, dim)
        unified_attention(
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32),
            max_seqlen_q=1,
            seqused_k=torch.tensor(lens, dtype=torch.int32),
            max_seqlen_k=max(lens),
            softmax_scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=torch.ones(requests, key.shape[2]),
            v_descale=torch.ones(requests, key.shape[2]),
            seq_threshold_3D=64,
            num_par_softmax_segments=16,
            softmax_segm_output=scratch,
            softmax_segm_max=torch.empty(requests, heads, 16),
            softmax_segm_expsum=torch.empty(requests, heads, 16),
        )
        return out

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


def probe() -> dict[str, Any]:
    """vToken's score kernel against the probe in plain torch: lengths that end within a tile, two
    layers, five signals of one request, maxima, some heads, a head size that is not a power of two,
    a capped softmax, attention sinks.
    """
    import numpy as np

    from vtoken.core.protocol.mirror import Mirrors
    from vtoken.policies.signals import Signal
    from vtoken.vllm.cuda import kernels
    from vtoken.vllm.cuda.layout import keys_of
    from vtoken.vllm.cuda.pages import PageTables
    from vtoken.vllm.cuda.signals.probing import DeviceProbe
    from vtoken.vllm.worker.probe import ProbedRequest

    torch.manual_seed(1)
    blocks, size, heads, dim, query_heads = 24, 16, 2, 24, 6
    both = (0, 1)
    signals = (
        Signal("attention_sum", layers=both),
        Signal("attention_window", 8, layers=both),
        Signal("attention_max", 8, "max", "max", layers=both, heads=(5, 1)),
        Signal("attention_last", 0, "max", layers=both, heads=(2,)),
        Signal("attention_hits", 8, "mean", "max", layers=both, heads=(0, 3, 4)),
    )
    layers = [torch.randn(blocks, size, heads, 2 * dim).permute(0, 2, 1, 3) for _ in range(2)]
    order = torch.randperm(blocks * size).numpy().astype(np.int64)
    parts = {"long": order[:130], "new": order[130:131], "chunk": order[131:200]}
    new = {"long": 1, "new": 1, "chunk": 3}
    queries = [torch.randn(5, query_heads, dim) for _ in layers]
    sinks = 3.0 + torch.randn(query_heads)

    def rows(
        *, use_triton: bool, soft_cap: float, sinks: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        pages, probed, first = PageTables(size, torch.device("cpu")), [], 0
        mirrors = Mirrors.of(parts)
        for name, mirror in mirrors.items():
            mirror.keep(signals)
            probed += ProbedRequest.of(name, first, new[name], mirror)
            first += new[name]
        known = pages.update(mirrors, mirrors.rows_of([*parts])).tolist()
        resident = dict(zip(parts, known, strict=True))
        probe = DeviceProbe(probed, pages, resident, use_triton=use_triton)
        for layer, (query, cache) in enumerate(zip(queries, layers, strict=True)):
            probe.add_layer(
                layer, query, keys_of(cache), scale=dim**-0.5, soft_cap=soft_cap, sinks=sinks
            )
        return [p.rows for p in probed if p.rows is not None]

    def error(**changed: Any) -> float:
        plain, kernel = rows(use_triton=False, **changed), rows(use_triton=True, **changed)
        assert len(plain) == len(kernel) == 15
        return max(float((a - b).abs().max()) for a, b in zip(plain, kernel, strict=True))

    errors = {"max_error": error(soft_cap=0.0), "max_error_capped": error(soft_cap=2.0)}
    errors["max_error_with_sinks"] = error(soft_cap=0.0, sinks=sinks)
    held, kernels.MAX_LOGITS = kernels.MAX_LOGITS, 1
    errors["max_error_one_by_one"] = error(soft_cap=0.0)
    kernels.MAX_LOGITS = held
    capped, plain = (rows(use_triton=True, soft_cap=cap)[0] for cap in (2.0, 0.0))
    sunk = rows(use_triton=True, soft_cap=0.0, sinks=sinks)[0]
    errors["max_error_damaged"] = float((capped - plain).abs().max())
    return errors | {"max_error_without_sinks": float((sunk - plain).abs().max())}


def note_victims(runtime: Any) -> list[tuple[int, list[int]]]:
    """Record victims from now on: the request's number of tokens, and the ids."""
    victims: list[tuple[int, list[int]]] = []

    def note(table: Any, picked: Any) -> None:
        if picked is not None:
            victims.append((table.num_tokens, sorted(picked.tolist())))

    watch_victims(runtime, note)
    return victims


def engine(model: str, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens of PROMPTS under each configuration, on the CUDA worker, and counts of what ran."""
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vtoken import vllm as plugin
    from vtoken.vllm.cuda import kernels
    from vtoken.vllm.cuda.pages import PageTables
    from vtoken.vllm.cuda.runner import DeviceRunnerMixin, GuardedRunnerMixin

    class Runner(DeviceRunnerMixin, GuardedRunnerMixin, CPUModelRunner):
        def _vtoken_prepare(self, layers: dict[str, Any]) -> Any:
            executor = super()._vtoken_prepare(layers)
            assert self.vtoken_device is not None
            self.vtoken_device.triton_probe = True  # as on a device
            return executor

    class Worker(CPUWorker):
        def init_device(self) -> None:
            super().init_device()
            self.model_runner = Runner.adopt(self.model_runner)

    register = plugin.register

    def register_triton() -> None:
        register()
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vtoken.vllm.cuda.backends.VTokenTritonBackend"
        )

    plugin.register = register_triton
    sys.modules[__name__].Worker = Worker  # type: ignore[attr-defined]
    paged: list[int] = []
    batch = PageTables.batch
    PageTables.batch = lambda *a: (paged.append(1), batch(*a))[1]  # type: ignore[method-assign]
    singles: list[int] = []
    scores = kernels.probe_scores
    kernels.probe_scores = lambda *a, **k: (singles.append(1), scores(*a, **k))  # type: ignore[assignment]
    results = []
    freeze_heap()
    for config in configs:
        paged.clear()
        singles.clear()
        args = plugin.engine_args(
            {"evict_when": "always", "verify_ratio": 1.0} | config, check_every_step=True
        )
        llm = LLM(model, **ENGINE, **args | {"worker_cls": f"{__name__}.Worker"})
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        runtime = llm.llm_engine.engine_core.engine_core.scheduler.vtoken
        victims = note_victims(runtime)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
        counters, shadow = runtime.counters, runtime.state.shadow.document()
        results.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "paged_steps": len(paged),
                "moved_tokens": counters.reclamation.moved_tokens,
                "recycled_slots": counters.reclamation.recycled_slots,
                "violations": counters.invariants.violations,
                "victims": sorted(victims),
                "shadow": None if shadow is None else [shadow.compared, shadow.agreed],
                "probed_singles": len(singles),
            }
        )
        llm.llm_engine.engine_core.shutdown()
    return results


def main() -> None:
    keep_triton()
    spare_interpreter()
    with frozen_heap():
        engines = engine(sys.argv[1], [json.loads(text) for text in sys.argv[2:]])
    document = {"attention": attention(), "probe": probe(), "engines": engines}
    print("\n" + json.dumps(document))


if __name__ == "__main__":
    sys.modules["tests.support.interpreted"] = sys.modules[__name__]
    __name__ = "tests.support.interpreted"  # vLLM imports the worker by this name
    main()
