"""Layers that vToken refuses on CUDA, because they cannot be read at page size 1.

Reads layers only by attribute, so that it can be tested without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cuda.layout import check_layout


def layer_reasons(layer: Any) -> Iterator[str]:
    """Why `layer`, whose cache exists, cannot be read at page size 1."""
    impl = layer.impl
    if not getattr(impl, "vtoken_paged_impl", False):
        yield (
            f"attention backend {type(impl).__name__}; use --attention-backend FLASH_ATTN "
            "(version 3) or TRITON_ATTN"
        )
        return
    version = getattr(impl, "vllm_flash_attn_version", 3)
    if version != 3:
        yield (
            f"FlashAttention {version} needs pages of 16 tokens; use --attention-backend "
            "TRITON_ATTN"
        )
    if getattr(impl, "use_td", False):
        yield "tensor descriptors need full pages; unset VLLM_TRITON_USE_TD"
    if getattr(impl, "sinks", None) is not None:
        yield "attention sinks in the kernel are neither scored nor tested"
    try:
        check_layout(layer.kv_cache)
    except UnsupportedError as error:
        yield str(error)
