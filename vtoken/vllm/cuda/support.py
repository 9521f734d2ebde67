"""Layers that vToken refuses on CUDA, because they cannot be read at page size 1.

Reads layers only by attribute, so that it can be tested without CUDA.
"""

from __future__ import annotations

from typing import Any

from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cuda.layout import check_layout
from vtoken.vllm.startup.cuda_rules import graph_rule


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
