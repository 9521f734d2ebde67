"""The vocabulary that the model's tokenizer knows, for policies that look at words.

The tokenizer is loaded when a policy that needs it is first chosen, in the engine's process, and
its vocabulary is classified once. An engine without a tokenizer refuses such policies.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.tokenizers import cached_tokenizer_from_config

from vtoken.arrays import Bools, Ints


class VLLMVocabulary:
    """`requests`: the scheduler's, by id."""

    def __init__(self, model_config: Any, requests: Mapping[str, Any]) -> None:
        self._model_config = model_config
        self._requests = requests
        self._kinds: tuple[Bools, Bools] | None = None  # special, punctuation, by vocabulary id
        self._refusal: str | None = None

    def refusal(self) -> str | None:
        if self._kinds is None and self._refusal is None:
            try:
                self._kinds = self._classify()
            except Exception as error:  # tokenizers of all makes may raise anything
                self._refusal = f"the model's tokenizer cannot be used: {error}"
        return self._refusal

    def words(self, request_id: str, ids: Ints) -> Ints:
        known = self._requests[request_id].all_token_ids[:]
        return np.asarray(known, dtype=np.int64)[ids]

    def special(self, words: Ints) -> Bools:
        return self._look_up(0, words)

    def punctuation(self, words: Ints) -> Bools:
        return self._look_up(1, words)

    def _look_up(self, kind: int, words: Ints) -> Bools:
        why = self.refusal()  # loads it, if nobody has asked yet
        if self._kinds is None:
            raise ValueError(why)
        mask: Bools = self._kinds[kind][words]
        return mask

    def _classify(self) -> tuple[Bools, Bools]:
        tokenizer = cached_tokenizer_from_config(self._model_config)
        if tokenizer is None:
            raise ValueError("the engine was started with skip_tokenizer_init")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        known = set(tokenizer.all_special_ids)
        known |= {number for number, token in added.items() if getattr(token, "special", False)}
        # Added tokens may stand beyond both sizes, with gaps before them.
        size = max(self._model_config.get_vocab_size(), len(tokenizer), *(n + 1 for n in known))
        special, punctuation = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
        special[sorted(known)] = True
        for number in range(len(tokenizer)):
            if not special[number]:
                punctuation[number] = is_punctuation(tokenizer.decode([number]))
        return special, punctuation


def is_punctuation(text: str) -> bool:
    """Whether `text` is punctuation (Unicode P*) and white space, and some of the former."""
    text = text.strip()
    return bool(text) and all(unicodedata.category(char).startswith("P") for char in text)
