"""Configurations that vToken refuses on CUDA, besides those of `vtoken.vllm.startup.support`.

Reads vLLM's configuration and layers only by attribute, so that it can be tested without CUDA.
"""

from __future__ import annotations

from typing import Any

from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cuda.layout import check_layout

Rule = tuple[bool, str]

OPT_IN = (
    "experimental, covered by CPU tests up to the device calls and never run on a GPU; "
    "enable it with --vtoken-experimental-cuda"
)
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def cuda_rules(config: Any, *, experimental: bool) -> list[Rule]:
    """The rules for a configuration whose device is CUDA."""
    return [
        (not experimental, f"CUDA: {OPT_IN}"),
        (
            not experimental and bool(config.use_v2_model_runner),
            f"model runner V2: {OPT_IN}",
        ),
        graph_rule(config.compilation_config),
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
    """The rule that a step with holes can leave full graphs: other graph modes must exist too.

    vLLM fixes the mode when the attention backends are known, so the rule is checked again then.
    """
    mode = getattr(compilation_config.cudagraph_mode, "name", "NONE")
    return (
        mode not in GRAPH_MODES,
        f"cudagraph mode {mode}: a step with holes cannot leave full graphs of mixed batches; "
        f"use one of {', '.join(GRAPH_MODES)}",
    )


def check_layers(layers: dict[str, Any], compilation_config: Any) -> None:
    """Raises UnsupportedError for layers that cannot be read at page size 1.

    Call it when the caches exist.
    """
    broken, reason = graph_rule(compilation_config)
    reasons = [reason] if broken else []
    for name, layer in layers.items():
        impl = layer.impl
        if not getattr(impl, "vtoken_paged_impl", False):
            reasons.append(
                f"{name}: attention backend {type(impl).__name__}; "
                "use --attention-backend FLASH_ATTN (version 3) or TRITON_ATTN"
            )
            continue
        version = getattr(impl, "vllm_flash_attn_version", 3)
        if version != 3:
            reasons.append(
                f"{name}: FlashAttention {version} needs pages of 16 tokens; "
                "use --attention-backend TRITON_ATTN"
            )
        if getattr(impl, "use_td", False):
            reasons.append(f"{name}: tensor descriptors need full pages; unset VLLM_TRITON_USE_TD")
        if getattr(impl, "sinks", None) is not None:
            reasons.append(f"{name}: attention sinks in the kernel are neither scored nor tested")
        try:
            check_layout(layer.kv_cache)
        except UnsupportedError as error:
            reasons.append(f"{name}: {error}")
    if reasons:
        raise UnsupportedError("vToken cannot serve these layers: " + "; ".join(reasons))
