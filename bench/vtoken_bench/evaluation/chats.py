"""Chats with a fact to find, as a workload: speed and answers come from the same outputs.

They are those of `vtoken_bench.grounds`, which no default was tuned on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vtoken_bench.grounds.prompts import Prompt, PromptMaker

FIRST_SEED = 10


@dataclass(frozen=True, slots=True)
class FactChats:
    """A text of about `text_tokens` that states a fact, and the question; `num_new` output tokens,
    also after the answer's end. `around_tokens`: of fact, question and chat template, at most.
    """

    name: str
    text_tokens: int
    num_new: int
    around_tokens: int = 80

    @property
    def longest_prompt(self) -> int:
        """Tokens; the prompts differ by some tens."""
        return self.text_tokens + self.around_tokens

    def longest(self) -> int:
        return self.longest_prompt + self.num_new

    def requests(self, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {"prompt": p.ids, "num_new": self.num_new} for p in self._prompts(model, count, seed)
        ]

    def texts(self, model: Path, count: int, seed: int) -> list[str]:
        """The prompts of `requests` as text, for a server."""
        maker = prompt_maker(model, self.text_tokens, seed)
        return [maker.text(prompt.ids) for prompt in self._prompts(model, count, seed)]

    def found(self, model: Path, seed: int, outputs: Sequence[Sequence[int]]) -> list[bool]:
        """For each request's output whether it has every string of the fact."""
        maker = prompt_maker(model, self.text_tokens, seed)
        return self._judged(model, seed, [maker.answer_text(ids) for ids in outputs])

    def found_in(self, model: Path, seed: int, outputs: Sequence[str]) -> list[bool]:
        """`found` of outputs as text, special tokens included."""
        maker = prompt_maker(model, self.text_tokens, seed)
        return self._judged(model, seed, [maker.turn(text) for text in outputs])

    def _judged(self, model: Path, seed: int, answers: Sequence[str]) -> list[bool]:
        prompts = self._prompts(model, len(answers), seed)
        return [p.fact.is_in(answer) for p, answer in zip(prompts, answers, strict=True)]

    def _prompts(self, model: Path, count: int, seed: int) -> list[Prompt]:
        maker = prompt_maker(model, self.text_tokens, seed)
        found = [maker.prompt("chat", number) for number in range(count)]
        longest, most = max(len(prompt.ids) for prompt in found), self.longest_prompt
        if longest > most:
            raise ValueError(
                f"a prompt of {self.name} has {longest} tokens, more than {most}: "
                "raise around_tokens"
            )
        return found


@cache
def prompt_maker(model: Path, text_tokens: int, seed: int) -> PromptMaker:
    """Of texts of about `text_tokens`, for the tokenizer in the folder `model`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptMaker(tokenizer, seed=FIRST_SEED + seed, num_tokens=text_tokens)
