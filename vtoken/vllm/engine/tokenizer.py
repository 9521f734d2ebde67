"""The model's tokenizer: kinds of words for policies, and the chat template.

The engine's process loads the tokenizer on first use, by a policy that reads words or a request
that protects parts of a chat. An engine without a tokenizer refuses such policies and finds no
parts.
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

from vtoken.base.arrays import Bools, Ints
from vtoken.core.config.prompt_parts import (
    NO_PARTS,
    ChatTemplate,
    PromptParts,
    learn_template,
)
from vtoken.core.config.rendering import Message, Tool
from vtoken.wire import NO_TOKEN_ID

log = init_logger("vllm.vtoken")


class VLLMVocabulary:
    """The vocabulary of the model's tokenizer; `requests`: the scheduler's, by id."""

    def __init__(self, model_config: Any, requests: Mapping[str, Any]) -> None:
        self._model_config = model_config
        self._requests = requests
        self._kinds: tuple[Bools, Bools] | None = None  # special, punctuation, by vocabulary id
        self._refusal: str | None = None

    def refusal(self) -> str | None:
        if self._kinds is None and self._refusal is None:
            try:
                self._kinds = self._classify()
            except Exception as error:  # custom tokenizers may raise anything
                self._refusal = f"the model's tokenizer cannot be used: {error}"
        return self._refusal

    def words(self, request_id: str, ids: Ints) -> Ints:
        words = self._requests[request_id].all_token_ids[:]
        return np.asarray(words, dtype=np.int64)[ids]

    def known_words(self, request_id: str, start: int, stop: int) -> Ints:
        request = self._requests[request_id]
        words = np.asarray(request.all_token_ids[start:stop], dtype=np.int64)
        is_token_id = request.prompt_is_token_ids  # None: the entire prompt is ids, or embeddings
        if is_token_id is None:
            is_token_id = [request.prompt_token_ids is not None] * request.num_prompt_tokens
        in_prompt = np.asarray(is_token_id[start:stop], dtype=np.bool_)
        words[: len(in_prompt)][~in_prompt] = NO_TOKEN_ID
        return words

    def special(self, words: Ints) -> Bools:
        return self._look_up(0, words)

    def punctuation(self, words: Ints) -> Bools:
        return self._look_up(1, words)

    def _look_up(self, kind: int, words: Ints) -> Bools:
        refusal = self.refusal()  # loads the tokenizer
        if self._kinds is None:
            raise ValueError(refusal)
        mask: Bools = self._kinds[kind][words]
        return mask

    def _classify(self) -> tuple[Bools, Bools]:
        tokenizer = cached_tokenizer_from_config(self._model_config)
        if tokenizer is None:
            raise ValueError("the engine was started with skip_tokenizer_init")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special_ids = set(tokenizer.all_special_ids)
        special_ids |= {n for n, token in added.items() if getattr(token, "special", False)}
        # Ids of added tokens may exceed both sizes, with gaps between them.
        sizes = self._model_config.get_vocab_size(), len(tokenizer)
        size = max(*sizes, *(n + 1 for n in special_ids))
        special, punctuation = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
        special[sorted(special_ids)] = True
        for number in range(len(tokenizer)):
            if not special[number]:
                punctuation[number] = is_punctuation(tokenizer.decode([number]))
        return special, punctuation


class VLLMChats:
    """Finds the parts of chat prompts by the chat template.

    `chat_template`: a file, a template or the name of one of vLLM's; "": the tokenizer's own.
    """

    def __init__(self, model_config: Any, chat_template: str = "") -> None:
        self._model_config = model_config
        self._chat_template = chat_template

    def parts(self, prompt_token_ids: Sequence[int] | None) -> PromptParts:
        """The parts of a prompt; none without a template, or for a prompt of embeddings (None)."""
        if prompt_token_ids is None or self.template is None:
            return NO_PARTS
        return self.template.find(np.asarray(prompt_token_ids, dtype=np.int64))

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The template, learned from small chats; None, with a log line, if that fails."""
        try:
            tokenizer = cached_tokenizer_from_config(self._model_config)
            if tokenizer is None:
                raise ValueError("the engine was started with skip_tokenizer_init")
            given = self._chat_template
            own = {"chat_template": load_chat_template(given)} if given else {}
            template = learn_template(lambda *chat: _render(tokenizer, own, *chat))
            if template is None:
                raise ValueError("its roles cannot be distinguished")
        except Exception as error:  # custom tokenizers may raise anything
            log.info("vToken: chat template not usable, no part of a chat is protected: %s", error)
            return None
        return template


def _render(
    tokenizer: Any,
    own: dict[str, str | None],
    messages: list[Message],
    is_prompt: bool,
    tools: Sequence[Tool],
) -> Sequence[int]:
    ids: Sequence[int] = tokenizer.apply_chat_template(
        messages,
        tools=[*tools] or None,
        tokenize=True,
        return_dict=False,
        add_generation_prompt=is_prompt,
        **own,
    )
    return ids


def is_punctuation(text: str) -> bool:
    """Whether `text` is punctuation (Unicode P*), possibly with white space around it."""
    text = text.strip()
    return bool(text) and all(unicodedata.category(char).startswith("P") for char in text)
