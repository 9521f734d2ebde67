"""Needles in real prose: prompts whose answer is at known tokens.

A needle is the sentence `One of the special magic numbers for KEY is: 7 DIGITS.` (from
NVIDIA/RULER) at the start of a sentence of Python's reference manual (`pydoc_data.topics`). The
prompt is rendered with the model's chat template if there is one. It ends where the model's turn
begins, as a chat does, since that is where a server evicts.

The needles' depths are evenly spaced over all prompts and over every second prompt.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from vtoken.base.errors import ProfileError

ADJECTIVES = ("bright", "quiet", "narrow", "hidden", "golden", "rapid", "gentle", "sturdy")
NOUNS = ("river", "lantern", "harbor", "engine", "meadow", "compass", "anchor", "willow")
DIGITS = 7
CHARACTERS_PER_TOKEN = 12  # of prose, above the mean of any tokenizer
BEFORE = "A special magic number is hidden in the following text. I will ask for it afterwards.\n"
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
ANSWER = "The special magic number for {key} mentioned in the provided text is"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with one needle.

    `answer`: indices in `token_ids` of the tokens that spell the needle's digits, ascending.
    `reply`: the tokens of the right answer that follow `token_ids`, a whole sentence. From index
    `sure` on, a model that has found the needle has only one choice.
    """

    token_ids: list[int]
    answer: list[int]
    reply: list[int]
    sure: int


def needle_prompts(tokenizer: Any, count: int, num_tokens: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts of about `num_tokens` tokens; equal arguments give equal prompts.

    Raises ProfileError if the tokenizer has no character offsets, or if `num_tokens` leaves no
    space for prose.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ProfileError("this model's tokenizer gives no character offsets of its tokens")
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    generator = random.Random(seed)
    return [
        _prompt(tokenizer, prose, (number + 0.5) / count, num_tokens, generator)
        for number in range(count)
    ]


def _prompt(
    tokenizer: Any, prose: str, depth: float, num_tokens: int, generator: random.Random
) -> Prompt:
    key = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
    digits = str(generator.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    needle = f"One of the special magic numbers for {key} is: {digits}. "
    frame = len(_encode(tokenizer, _render(tokenizer, needle, key))["input_ids"])
    if num_tokens < 2 * frame:
        raise ProfileError(f"--tokens = {num_tokens} is not at least {2 * frame} for this model")
    most = CHARACTERS_PER_TOKEN * num_tokens
    start = generator.randrange(len(prose) - most)
    passage = prose[start : start + most]
    end = _encode(tokenizer, passage)["offset_mapping"][num_tokens - frame - 1][1]
    passage = passage[:end]
    starts = [0, *(found.end() for found in re.finditer(r"[.:]\s+|\n+", passage))]
    place = min(starts, key=lambda start: abs(start - depth * end))
    text = _render(tokenizer, passage[:place] + needle + passage[place:], key)
    encoded = _encode(tokenizer, text)
    answer = _spelling(encoded, text.index(needle) + needle.index(digits))
    begun = f"{text}{ANSWER.format(key=key)} "
    answered = _encode(tokenizer, begun + digits)
    num_tokens = len(encoded["input_ids"])
    spelled = _spelling(answered, len(begun))
    return Prompt(
        encoded["input_ids"],
        answer,
        answered["input_ids"][num_tokens:],
        (spelled[1:] or spelled)[0] - num_tokens,  # models may begin with a quote or bold text
    )


def _spelling(encoded: Any, first: int) -> list[int]:
    """The tokens that hold one of the DIGITS characters from `first` on."""
    return [
        token
        for token, (begin, end) in enumerate(encoded["offset_mapping"])
        if begin < first + DIGITS and end > first
    ]


def _render(tokenizer: Any, context: str, key: str) -> str:
    """The complete prompt as text, up to the model's turn."""
    user = BEFORE + context + QUESTION.format(key=key)
    if tokenizer.chat_template is None:
        return f"{tokenizer.bos_token or ''}{user}\n"
    chat = [{"role": "user", "content": user}]
    rendered: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return rendered


def _encode(tokenizer: Any, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
