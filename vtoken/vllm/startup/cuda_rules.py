"""Configurations that vToken refuses on CUDA, besides those of `vtoken.vllm.startup.support`.

Reads vLLM's configuration only by attribute, so that it can be tested without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OPT_IN = (
    "experimental: it has run on one kind of GPU, for a quarter of an hour (docs/gpu.md); "
    "enable it with --vtoken-experimental-cuda"
)
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def cuda_reasons(config: Any, *, experimental: bool) -> Iterator[str]:
    """Why a configuration whose device is CUDA is refused."""
    if not experimental:
        yield f"CUDA: {OPT_IN}"
    if not config.use_v2_model_runner:
        yield (
            "model runner V1 on CUDA: unset VLLM_USE_V2_MODEL_RUNNER, and leave features out that "
            "make vLLM choose V1"
        )
    yield from graph_reasons(config.compilation_config)
    if config.parallel_config.pipeline_parallel_size > 1:
        yield (
            "pipeline parallelism on CUDA: stages exchange scores on the host; use "
            "--tensor-parallel-size"
        )
    if config.parallel_config.use_ubatching:
        yield "microbatching: the page table covers the entire batch"
    if config.model_config.enable_sleep_mode:
        yield (
            "sleep mode: it discards the KV cache, and waking up was never tested on a GPU; leave "
            "--enable-sleep-mode out"
        )


def graph_reasons(compilation_config: Any) -> Iterator[str]:
    """A step can leave full graphs to probe a layer only if there are other graphs too.

    vLLM fixes the mode when the attention backends are known, so this is checked again then.
    """
    mode = getattr(compilation_config.cudagraph_mode, "name", "NONE")
    if mode not in GRAPH_MODES:
        yield (
            f"cudagraph mode {mode}: a step that probes cannot leave full graphs of mixed batches; "
            f"use one of {', '.join(GRAPH_MODES)}"
        )
