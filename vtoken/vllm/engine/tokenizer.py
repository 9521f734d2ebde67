"""What the model's tokenizer knows: kinds of words for policies, and its chat template.

The tokenizer is loaded in the engine's process when it is first needed: by a policy that looks at
words, or by a request of which parts of a chat are protected. An engine without a tokenizer refuses
such policies and finds no parts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.renderers.chat_utils import load_chat_template
from vllm.tokenizers import cached_tokenizer_from_config

from vtoken.arrays import Bools, Ints
from vtoken.config.prompt_parts import (
    NO_PARTS,
    ChatTemplate,
    Message,
    PromptParts,
    learn_template,
)
from vtoken.wire import NO_WORD

log = init_logger("vllm.vtoken")


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

    def known_words(self, request_id: str, start: int, stop: int) -> Ints:
        request = self._requests[request_id]
        words = np.asarray(request.all_token_ids[start:stop], dtype=np.int64)
        told = request.prompt_is_token_ids  # None: all of the prompt is ids, or embeddings
        if told is None:
            told = [request.prompt_token_ids is not None] * request.num_prompt_tokens
        in_prompt = np.asarray(told[start:stop], dtype=np.bool_)
        words[: len(in_prompt)][~in_prompt] = NO_WORD
        return words

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


class VLLMChats:
    """The parts of chat prompts, by the template that renders them: `given`, a file, a template or
    the name of one of vLLM's; where it is empty, that of the model's tokenizer.
    """

    def __init__(self, model_config: Any, given: str = "") -> None:
        self._model_config = model_config
        self._given = given

    def parts(self, prompt_token_ids: Sequence[int] | None) -> PromptParts:
        """The parts of a prompt: none without a template, or where it came as embeddings (None)."""
        if prompt_token_ids is None or self.template is None:
            return NO_PARTS
        return self.template.find(np.asarray(prompt_token_ids, dtype=np.int64))

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Learned from small chats; None, with a line in the log, where that is not possible."""
        try:
            tokenizer = cached_tokenizer_from_config(self._model_config)
            if tokenizer is None:
                raise ValueError("the engine was started with skip_tokenizer_init")
            own = {"chat_template": load_chat_template(self._given)} if self._given else {}
            template = learn_template(lambda *chat: _render(tokenizer, own, *chat))
            if template is None:
                raise ValueError("its roles cannot be told apart")
        except Exception as error:  # tokenizers of all makes may raise anything
            log.info("vToken: no chat template, no part of a prompt is protected by it: %s", error)
            return None
        return template


def _render(
    tokenizer: Any, own: dict[str, str | None], messages: list[Message], is_prompt: bool
) -> Sequence[int]:
    ids: Sequence[int] = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=is_prompt, **own
    )
    return ids


def is_punctuation(text: str) -> bool:
    """Whether `text` is punctuation (Unicode P*) and white space, and some of the former."""
    text = text.strip()
    return bool(text) and all(unicodedata.category(char).startswith("P") for char in text)
