"""What vToken refuses on CUDA beyond what it refuses everywhere (`vtoken.vllm.startup.support`).

Knows vLLM's configuration and layers by their attributes only, so that it can be tested anywhere.
"""

from __future__ import annotations

from typing import Any

from vtoken.errors import UnsupportedError
from vtoken.vllm.cuda.layout import check_layout

Rule = tuple[bool, str]

OPT_IN = (
    "written, covered by CPU tests up to the device calls, never run on a GPU yet; "
    "--vtoken-experimental-cuda tries it"
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
            "microbatching: a page table is made for the batch as a whole",
        ),
    ]


def graph_rule(compilation_config: Any) -> Rule:
    """Full graphs are left in steps with holes, which is possible where others exist beside them.

    vLLM settles the mode only when the attention backends are known: looked at again then.
    """
    mode = getattr(compilation_config.cudagraph_mode, "name", "NONE")
    return (
        mode not in GRAPH_MODES,
        f"cudagraph mode {mode}: a step with holes could not leave full graphs of mixed batches; "
        f"use one of {', '.join(GRAPH_MODES)}",
    )


def check_layers(layers: dict[str, Any], compilation_config: Any) -> None:
    """Raises UnsupportedError for what cannot be read at page size 1, when the caches exist."""
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
                f"{name}: FlashAttention {version} wants pages of 16 tokens; "
                "use --attention-backend TRITON_ATTN"
            )
        if getattr(impl, "use_td", False):
            reasons.append(f"{name}: tensor descriptors need whole pages; unset VLLM_TRITON_USE_TD")
        if getattr(impl, "sinks", None) is not None:
            reasons.append(f"{name}: attention sinks in the kernel are not scored nor tested")
        try:
            check_layout(layer.kv_cache)
        except UnsupportedError as error:
            reasons.append(f"{name}: {error}")
    if reasons:
        raise UnsupportedError("vToken cannot serve these layers: " + "; ".join(reasons))
