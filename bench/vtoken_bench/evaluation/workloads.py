"""Workloads: lengths from a file that names its source, prompts of real text.

The text is the reference prose that comes with Python. A request's prompt begins anywhere in it, so
that no two have the same beginning; a seed gives the same prompts again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from vtoken_bench.texts import token_ids

MIN_OUTPUT_TOKENS = 8
ALL_ROWS = 96  # of the longest file; a shorter one is taken again and again
MIN_BUDGET_TOKENS = 32
QUESTION = "Explain the passage above in one or two short sentences."


@dataclass(frozen=True, slots=True)
class Workload:
    """`lengths`: a file of `lengths/`, cut down by the scales, or one pair for every request.

    `longest_tokens` of prompt and output: a longer request loses the end of its prompt.
    """

    name: str
    lengths: str | tuple[int, int]
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    longest_tokens: int = 1 << 20

    def sizes(self, count: int, seed: int) -> list[tuple[int, int]]:
        """Prompt and output tokens of `count` requests; another seed takes other rows."""
        if isinstance(self.lengths, tuple):
            return [self.lengths] * count
        rows = _rows(self.lengths)
        return [self._scaled(*rows[(seed * count + i) % len(rows)]) for i in range(count)]

    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(sum, self.sizes(ALL_ROWS, 0)))

    def mean(self) -> float:
        """Tokens of a request in the mean, prompt and output."""
        return sum(map(sum, self.sizes(ALL_ROWS, 0))) / ALL_ROWS

    def _scaled(self, num_prompt: int, num_new: int) -> tuple[int, int]:
        output = max(MIN_OUTPUT_TOKENS, round(num_new * self.output_scale))
        output = min(output, self.longest_tokens // 2)
        prompt = max(MIN_BUDGET_TOKENS, round(num_prompt * self.prompt_scale))
        return min(prompt, self.longest_tokens - output), output

    def described(self) -> str:
        """How the lengths came about, for a table's title."""
        if isinstance(self.lengths, tuple):
            return f"{self.lengths[0]} + {self.lengths[1]} tokens"
        scale = f"prompts x {self.prompt_scale:.3g}, outputs x {self.output_scale:.3g}"
        return f"{self.lengths}.csv, {scale}, at most {self.longest_tokens:,} tokens"


def budget_tokens(num_prompt: int, num_new: int, ratio: float) -> int:
    """The share of prompt and output that a request may keep."""
    return max(MIN_BUDGET_TOKENS, round((num_prompt + num_new) * ratio))


def requests(
    model: Path,
    sizes: Sequence[tuple[int, int]],
    seed: int,
    *,
    keep: float | None,
    shared: tuple[int, int] | None = None,
    questions: bool = False,
    continues: bool = False,
) -> list[dict[str, Any]]:
    """For a load's `requests`. `keep`: budgets of that share; None: no budget of their own.

    `shared` (degree, tokens): groups of so many requests begin with the same tokens. `questions`:
    the text is the user's turn of a chat with `QUESTION` behind it, where the model has a chat
    template. `continues`: each request has a `reference`, the tokens of the text behind its prompt.
    """
    rng, ids = random.Random(seed), token_ids(model)
    found, beginning = [], [0]
    for i, (num_prompt, num_new) in enumerate(sizes):
        at = rng.randrange(len(ids) - num_prompt)
        prompt = ids[at : at + num_prompt]
        if shared is not None:
            degree, num_shared = shared
            if i % degree == 0:
                start = rng.randrange(len(ids) - num_shared)
                beginning = ids[start : start + num_shared]
            prompt = beginning + prompt[num_shared:]
        if questions:
            prompt = _asked(model, prompt)
        request: dict[str, Any] = {"prompt": prompt, "num_new": num_new}
        if continues:
            end = at + num_prompt
            request["reference"] = ids[end : end + num_new]
        if keep is not None:
            budget = budget_tokens(num_prompt, num_new, keep)
            request["arguments"] = {"vtoken_budget_tokens": budget}
        found.append(request)
    return found


def set_arrivals(found: list[dict[str, Any]], rate: float, seed: int) -> None:
    """The requests arrive as a Poisson process, `rate` a second."""
    rng, clock = random.Random(seed), 0.0
    for request in found:
        clock += rng.expovariate(rate)
        request["arrival_s"] = clock


def _asked(model: Path, passage: list[int]) -> list[int]:
    """The passage and the question as a chat; the passage alone without a template."""
    tokenizer = _tokenizer(model)
    if tokenizer.chat_template is None:
        return passage
    text = f"{tokenizer.decode(passage)}\n\n{QUESTION}"
    turns = [{"role": "user", "content": text}]
    chat: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(chat, add_special_tokens=False)
    return ids


@cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@cache
def _rows(name: str) -> tuple[tuple[int, int], ...]:
    """The rows of one file of lengths; lines that begin with # say where they are from."""
    text = (files("vtoken_bench.evaluation") / "lengths" / f"{name}.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines[0] == "prompt_tokens,output_tokens", name
    pairs = (line.split(",") for line in lines[1:])
    return tuple((int(prompt), int(output)) for prompt, output in pairs)
