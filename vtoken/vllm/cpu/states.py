"""Drafts beside states on CPU: rows of full length for vLLM's layers of GDN.

A row holds the tokens of one request in a step: the newest and up to k drafts. A layer of GDN keeps
the inputs of its last convolutions, so that the next step can go on from any draft that is
accepted. vLLM 0.32 appends a row's inputs at the end of that buffer, and the next step looks for
them where they are only if the row had all k drafts: after a shorter row it reads others, or fails.
So shorter rows are padded. Nothing reads what the layer computes behind a row's last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention


def fill_rows() -> None:
    """Wrap the core of vLLM's layer of GDN for rows with drafts. Idempotent."""
    core = gdn_attention._spec_forward
    if not hasattr(core, "fills_rows"):
        gdn_attention._spec_forward = _filling(core)


def _filling(core: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(core)
    def spec_forward(
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: torch.Tensor,
        b_spec: torch.Tensor,
        a_spec: torch.Tensor,
        *states: Any,
    ) -> torch.Tensor:
        num_rows = attn_metadata_i.num_spec_decodes
        bounds = attn_metadata_i.spec_query_start_loc[: num_rows + 1]
        size = attn_metadata_i.spec_state_indices_tensor.shape[1]  # 1 + k
        lengths = bounds.diff()
        if bool((lengths == size).all()):
            return core(layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, *states)
        filled = torch.arange(num_rows + 1, dtype=bounds.dtype) * size
        # The place of each token among the tokens of filled rows.
        shift = torch.repeat_interleave(filled[:-1] - bounds[:-1], lengths)
        places = shift + torch.arange(len(shift))

        def fill(tokens: torch.Tensor) -> torch.Tensor:
            rows = tokens.new_zeros(num_rows * size, *tokens.shape[1:])
            rows[places] = tokens[: len(places)]
            return rows

        metadata = replace(attn_metadata_i, spec_query_start_loc=filled)
        parts = fill(mixed_qkv_spec), fill(b_spec), fill(a_spec)
        return core(layer, metadata, *parts, *states)[places]

    spec_forward.fills_rows = True  # type: ignore[attr-defined]
    return spec_forward
