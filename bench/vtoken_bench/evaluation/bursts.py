"""Long requests that are asked at their ends, and bursts of chats meanwhile, as a workload.

The long ones state facts in their prompts, continue them for some hundred tokens that are forced,
and answer questions about them last. While they run, chats arrive in bursts, need more memory than
is free, and end; then it is quiet until the next burst, or until all have ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_bench import forcing
from vtoken_bench.evaluation.chats import FactChats, prompt_maker
from vtoken_bench.grounds.prompts import Questions

NUM_ANSWER = 12  # tokens, after the answer's forced beginning
BACKGROUND = 1  # vLLM's priority of the long ones; the chats', 0, is more important
LONG = 1.0  # the long ones arrive within this time, in seconds


@dataclass(frozen=True, slots=True)
class Bursts:
    """`num_long` long requests with prompts of about `text_tokens`, whose outputs before the
    questions have `least_output` to `most_output` tokens; and `chats`, which arrive from each of
    `starts_s` on, within `burst_s`, in equal numbers.
    """

    num_long: int
    text_tokens: int
    least_output: int
    most_output: int
    chats: FactChats
    starts_s: tuple[float, ...]
    burst_s: float = 2.0
    around_tokens: int = 160  # of the facts and the chat template, at most
    questions_tokens: int = 230  # and their answers, at most

    @property
    def engine_args(self) -> dict[str, Any]:
        """Of vLLM, beside those that every load has."""
        return {"logits_processors": [forcing.PROCESSOR], "scheduling_policy": "priority"}

    def longest(self) -> int:
        own = self.text_tokens + self.around_tokens + self.most_output + self.questions_tokens
        return max(own, self.chats.longest())

    def requests(self, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
        """By arrival. `count`: of all, long ones and chats."""
        rng = random.Random(seed)
        found = [
            {
                "prompt": sample.ids,
                "num_new": len(sample.forced),
                "arguments": {forcing.ARGUMENT: sample.forced},
                "arrival_s": rng.uniform(0, LONG),
                "priority": BACKGROUND,
            }
            for sample in self._samples(model, seed)
        ]
        num_chats = count - self.num_long
        chats = self.chats.requests(model, num_chats, seed) if num_chats else []
        for number, chat in enumerate(chats):
            start = self.starts_s[number % len(self.starts_s)]
            found.append(chat | {"arrival_s": start + rng.uniform(0, self.burst_s)})
        return sorted(found, key=lambda request: float(request["arrival_s"]))

    def found(self, model: Path, seed: int, outputs: Sequence[Sequence[int]]) -> list[bool]:
        """For each fact of the long requests whether its answer has it; `outputs`: by arrival."""
        maker, samples = prompt_maker(model, self.text_tokens, seed), self._samples(model, seed)
        order = [request["prompt"] for request in self.requests(model, len(outputs), seed)]
        by_prompt = dict(zip(map(tuple, order), outputs, strict=True))
        return [
            fact.is_in(maker.answer_text(by_prompt[tuple(sample.ids)][begin:end]))
            for sample in samples
            for fact, (begin, end) in zip(sample.facts, sample.answers, strict=True)
        ]

    def _samples(self, model: Path, seed: int) -> list[Questions]:
        maker, step = prompt_maker(model, self.text_tokens, seed), self.num_long - 1
        lengths = [
            self.least_output + (self.most_output - self.least_output) * number // max(step, 1)
            for number in range(self.num_long)
        ]
        return [maker.questions(n, length, NUM_ANSWER) for n, length in enumerate(lengths)]
