"""The attention of every layer of a model on a prompt, from one forward pass in transformers.

The model runs with its own eager attention. A hook is called with each layer's attention weights
and keys as soon as they are computed, and only its results are kept: the weights of one layer,
heads * tokens^2 numbers, are in memory at a time. Functions import torch and transformers when
called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vtoken.base.errors import ProfileError

NAME = "vtoken_calibration"  # of the attention implementation, for transformers
T = TypeVar("T")
# (layer, softmax rows [query heads, n, n], keys after RoPE [KV heads, n, head size]), torch tensors
LayerHook = Callable[[int, Any, Any], T]


class Observer:
    """A model whose attention can be observed.

    `num_layers`, `num_heads` (query heads) and `max_tokens` (None: not limited) are the model's.
    Raises ProfileError for a model that transformers cannot run here. `observe` raises it for a
    model whose attention transformers cannot replace.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: str = "auto") -> None:
        import torch
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=NAME
            )
            self._model = model.to(torch.device(device)).eval()
        except (OSError, RuntimeError, ValueError) as error:
            raise ProfileError(f"the model in {folder} cannot be run here: {error}") from None
        config = model.config.get_text_config()
        if others := {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
            raise ProfileError(
                f"the model in {folder} has layers of type {', '.join(sorted(others))}: only "
                "models of full attention are calibrated. Others are served with default layers"
            )
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self._hook: LayerHook[Any] = lambda *_: None
        self._results: dict[int, Any] = {}  # of the hook, by layer
        self._cache: Any = None  # of the prompt observed last

    def observe(self, token_ids: list[int], hook: LayerHook[T]) -> list[T]:
        """The results of `hook` for each layer, in order, of a forward pass over `token_ids`."""
        import torch

        self._hook, self._results = hook, {}
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._model.device)
            self._cache = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        if sorted(self._results) != list(range(self.num_layers)):
            observed = f"{len(self._results)} of {self.num_layers}"
            raise ProfileError(f"attention can be observed in only {observed} layers")
        return [self._results[layer] for layer in range(self.num_layers)]

    def choices(self, token_ids: list[int]) -> list[int]:
        """The model's most likely token after each of `token_ids` but the last.

        `token_ids` continue the prompt observed last. Call it at most once after each `observe`.
        """
        import torch

        self._hook, self._results = lambda *_: None, {}
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._model.device)
            logits = self._model(ids, past_key_values=self._cache).logits
        chosen: list[int] = logits[0, :-1].argmax(dim=-1).tolist()
        return chosen

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        """The model's own eager attention, with the hook."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise ProfileError(f"{type(module).__name__} has no eager attention to observe")
        output, weights = eager(module, query, key, value, mask, **kwargs)
        self._results[module.layer_idx] = self._hook(module.layer_idx, weights[0], key[0])
        return output, None
