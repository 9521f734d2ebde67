"""What every layer of a model attends to on a prompt, from one forward pass in transformers.

Knows torch and transformers, imported inside functions; no engine. The model runs with its own
eager attention. `look` is called with a layer's attention weights and keys as soon as they are
computed, and what it does not return is dropped: one layer's weights, heads * tokens^2 numbers, are
in memory at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vtoken.errors import ProfileError

NAME = "vtoken_calibration"  # of the attention implementation, for transformers
T = TypeVar("T")
# (layer, softmax rows [query heads, n, n], keys after RoPE [KV heads, n, head size]), torch tensors
Look = Callable[[int, Any, Any], T]


class Observer:
    """A model whose attention can be looked at.

    `num_layers`, `num_heads` (query heads) and `max_tokens` (None: not limited) are the model's.
    Raises ProfileError for a model that transformers cannot run, or whose attention is its own.
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
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self._look: Look[Any] = lambda *_: None
        self._found: dict[int, Any] = {}
        self._cache: Any = None  # of the prompt observed last

    def observe(self, token_ids: list[int], look: Look[T]) -> list[T]:
        """What `look` makes of each layer, in their order, when the model has read `token_ids`."""
        import torch

        self._look, self._found = look, {}
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._model.device)
            self._cache = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        if sorted(self._found) != list(range(self.num_layers)):
            raise ProfileError(
                f"attention can be observed in {len(self._found)} of {self.num_layers} layers only"
            )
        return [self._found[layer] for layer in range(self.num_layers)]

    def choices(self, token_ids: list[int]) -> list[int]:
        """The model's first choice in place of each of `token_ids` but the first, when they follow
        what was observed last. Once an observation.
        """
        import torch

        self._look, self._found = lambda *_: None, {}
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._model.device)
            logits = self._model(ids, past_key_values=self._cache).logits
        chosen: list[int] = logits[0, :-1].argmax(dim=-1).tolist()
        return chosen

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        """The model's own eager attention, looked at."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise ProfileError(f"{type(module).__name__} has no eager attention to observe")
        output, weights = eager(module, query, key, value, mask, **kwargs)
        self._found[module.layer_idx] = self._look(module.layer_idx, weights[0], key[0])
        return output, None
