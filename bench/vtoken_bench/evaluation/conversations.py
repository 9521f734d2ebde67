"""Chats of several turns that ask for facts of this turn or of an earlier one, as a workload.

Every turn brings a text, with the facts that it or a later turn asks for, and asks for one. Its
prompt has the turns before it, with each fact's statement as the answer, whatever the model said.
So prompts are the same in every run, and each begins with all tokens of the one before it: those
are what the prefix cache can hit, and the answer's are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_bench.evaluation.chats import prompt_maker
from vtoken_bench.grounds.prompts import Chat

TURNS = 4
# Of every four chats: the turn that states what turn n asks for. Nothing is older than its chat, so
# ages 0 and 1 have five questions of sixteen, and 2 and 3 three.
SOURCES = ((0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 2))


@dataclass(frozen=True, slots=True)
class Conversations:
    """In every turn a text of about `text_tokens`, and `num_new` output tokens, also after the
    answer's end. `around_tokens`: of a turn's fact, question, answer and chat template, at most.
    """

    text_tokens: int
    num_new: int
    around_tokens: int = 80

    @property
    def engine_args(self) -> dict[str, Any]:
        """Of vLLM, beside those that every load has."""
        return {"enable_prefix_caching": True}

    @property
    def longest_prompt(self) -> int:
        return TURNS * (self.text_tokens + self.around_tokens)

    def longest(self) -> int:
        return self.longest_prompt + self.num_new

    def requests(self, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
        """Chat by chat. A turn takes the place of the one before it."""
        found: list[dict[str, Any]] = []
        for chat in self._chats(model, count, seed):
            for turn, prompt in enumerate(chat.prompts):
                after = {"after": len(found) - 1} if turn else {}
                request = {"prompt": prompt, "num_new": self.num_new, "turn": turn + 1}
                found.append(request | after)
        return found

    def found(self, model: Path, seed: int, outputs: Sequence[Sequence[int]]) -> list[bool]:
        """For each request's output whether it has every string of the fact."""
        maker = prompt_maker(model, self.text_tokens, seed)
        facts = [fact for chat in self._chats(model, len(outputs), seed) for fact in chat.facts]
        return [
            fact.is_in(maker.answer_text(ids)) for fact, ids in zip(facts, outputs, strict=True)
        ]

    def _chats(self, model: Path, count: int, seed: int) -> list[Chat]:
        """With `count` turns in all. Raises ValueError where a chat is too long."""
        maker = prompt_maker(model, self.text_tokens, seed)
        chats = [
            maker.chat(number, SOURCES[number % len(SOURCES)]) for number in range(count // TURNS)
        ]
        longest, most = max(len(chat.prompts[-1]) for chat in chats), self.longest_prompt
        if longest > most:
            raise ValueError(
                f"a prompt has {longest} tokens, more than {most}: raise around_tokens"
            )
        return chats


def age(number: int) -> int:
    """Of what request `number` asks for: how many turns ago it was stated."""
    chat, turn = divmod(number, TURNS)
    return turn - SOURCES[chat % len(SOURCES)][turn]
