"""Configurations that vToken refuses on CUDA, besides those of `vtoken.vllm.startup.support`.

Reads vLLM's configuration only by attribute, so that it can be tested without CUDA.
"""

from __future__ import annotations

from typing import Any

Rule = tuple[bool, str]

OPT_IN = (
    "experimental: it has run on one kind of GPU, for a quarter of an hour (docs/gpu.md); "
    "enable it with --vtoken-experimental-cuda"
)
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def cuda_rules(config: Any, *, experimental: bool) -> list[Rule]:
    """The rules for a configuration whose device is CUDA."""
    return [
        (not experimental, f"CUDA: {OPT_IN}"),
        (
            not config.use_v2_model_runner,
            "model runner V1 on CUDA: unset VLLM_USE_V2_MODEL_RUNNER, and leave features out that "
            "make vLLM choose V1",
        ),
        graph_rule(config.compilation_config),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "pipeline parallelism on CUDA: stages exchange scores on the host; use "
            "--tensor-parallel-size",
        ),
        (
            bool(config.parallel_config.use_ubatching),
            "microbatching: the page table covers the entire batch",
        ),
        (
            bool(config.model_config.enable_sleep_mode),
            "sleep mode: it discards the KV cache, and waking up was never tested on a GPU; leave "
            "--enable-sleep-mode out",
        ),
    ]


def graph_rule(compilation_config: Any) -> Rule:
    """The rule that a step can leave full graphs to probe a layer: there must be other graphs too.

    vLLM fixes the mode when the attention backends are known, so the rule is checked again then.
    """
    mode = getattr(compilation_config.cudagraph_mode, "name", "NONE")
    return (
        mode not in GRAPH_MODES,
        f"cudagraph mode {mode}: a step that probes cannot leave full graphs of mixed batches; "
        f"use one of {', '.join(GRAPH_MODES)}",
    )
