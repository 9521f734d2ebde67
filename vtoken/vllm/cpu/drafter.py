"""vToken in vLLM's drafter on CPU: physical slots of the tokens that a drafter's layers compute.

In EAGLE and MTP the first pass writes to the model's slots, which are physical already. vLLM
computes the other slots from positions, and lengths from the batch's; `VTokenCPUMetadataBuilder`
corrects the lengths of every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vtoken.vllm.cpu import context
from vtoken.vllm.startup import support


class VTokenDrafterMixin:
    """Put before the class of a vLLM drafter with layers."""

    needs_extra_input_slots: bool
    _draft_attn_layer_names: set[str]
    positions: torch.Tensor

    @classmethod
    def adopt(cls, drafter: Any, layer_names: Sequence[str]) -> None:
        """Turn a constructed `drafter` into this one.

        Raises UnsupportedError unless `layer_names` are all of its layers with K and V.
        """
        base = type(drafter)
        drafter.__class__ = type(f"VToken{base.__name__}", (cls, base), {})
        drafter.require_layers(layer_names)

    def require_layers(self, names: Sequence[str]) -> None:
        """Raises UnsupportedError unless `names` are all layers of the drafter with K and V."""
        own = self._draft_attn_layer_names
        if own != {*names}:
            support.refuse(
                f"a drafter with the layers {', '.join(sorted(own))}, where the KV cache has "
                f"{', '.join(names) or 'none'} behind the model's: take the method ngram or suffix "
                "in --speculative-config"
            )

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. With a token more than the target's, all slots come from positions."""
        prepared: Any = super().set_inputs_first_pass(*args, **kwargs)  # type: ignore[misc]
        num_tokens, _, common = prepared
        if self.needs_extra_input_slots:
            _correct(common, self.positions[:num_tokens])
        return prepared

    def _update_positions_dependent_metadata(
        self, positions: torch.Tensor, common: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        update = super()._update_positions_dependent_metadata  # type: ignore[misc]
        positions = update(positions, common, *args, **kwargs)
        _correct(common, positions)
        return positions


def _correct(common: Any, positions: torch.Tensor) -> None:
    step = context.current()
    if step is not None and step.ahead is not None:
        step.ahead.correct(common.slot_mapping, common.query_start_loc_cpu, positions)
