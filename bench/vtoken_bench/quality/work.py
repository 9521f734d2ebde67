"""Jobs: one sample under one setting each, with its log key, its cost and its function.

A job that compares with the full cache reads the full cache's sample from the log; the bench runs
those jobs first.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from vtoken_bench.log import Key, Log
from vtoken_bench.quality import ruler
from vtoken_bench.quality.measures import (
    divergence,
    equal_share,
    first,
    repetition,
    rouge_l,
    string_match_all,
)
from vtoken_bench.quality.ruler import TASKS, Sample
from vtoken_bench.quality.server import NUM_TOP, QualityServer
from vtoken_bench.quality.settings import FULL, Setting
from vtoken_bench.texts import english

# aware: the question is part of the prompt. later: it comes after the context has been evicted.
Question = Literal["aware", "later"]
Kind = Literal["prose", "chat"]
DECODE_COST = 8  # of a decoded token in prompt tokens, to estimate the time left
INSTRUCTIONS = (
    "Summarize the text above in your own words.",
    "Explain the main ideas of the text above to a beginner.",
    "List the most important points of the text above.",
    "Write an introduction to the topic of the text above.",
    "Which rules does the text above state? Explain each of them.",
    "Write questions and answers about the text above.",
)


@dataclass(frozen=True)
class Job:
    key: Key
    cost: int  # in prompt tokens
    run: Callable[[], Any]


@dataclass(frozen=True)
class Prompt:
    """Token ids; the question begins at `question_at`."""

    ids: list[int]
    question_at: int
    sample: Sample


class Prompts:
    """Prompts of tasks and continuations, made on first use; thread-safe."""

    def __init__(self, server: QualityServer) -> None:
        self._server = server
        self._made: dict[tuple[str, int, int], Prompt] = {}
        self._lock = threading.Lock()

    def of(self, what: str, length: int, number: int) -> Prompt:
        """Prompt `number` of a task, or of "prose" or "chat", where `length` is without output."""
        with self._lock:
            name = (what, length, number)
            if name not in self._made:
                self._made[name] = self._make(*name)
            return self._made[name]

    def _make(self, what: str, length: int, number: int) -> Prompt:
        if what == "prose":
            start = random.Random(f"prose/{length}/{number}").randrange(len(self._prose) - length)
            ids = self._prose[start : start + length]
            return Prompt(ids, length, Sample("", "", "", ()))
        if what == "chat":
            sample = self._passage(length, number)
        else:
            sample = ruler.fitted(what, number, length, lambda s: len(self._ids(s)))
        ids = self._ids(sample)
        without = self._server.prompt(sample.context)
        same = (i for i, (a, b) in enumerate(zip(ids, without, strict=False)) if a != b)
        return Prompt(ids, next(same, len(without)), sample)

    def _ids(self, sample: Sample) -> list[int]:
        return self._server.prompt(sample.context + sample.question, sample.answer_prefix)

    def _passage(self, length: int, number: int) -> Sample:
        words = ruler.prose()
        start = random.Random(f"chat/{length}/{number}").randrange(len(words) - length)
        question = INSTRUCTIONS[number % len(INSTRUCTIONS)]

        def made(size: int) -> Sample:
            return Sample(f"{' '.join(words[start : start + size])}\n\n", question, "", ())

        sample = ruler.largest(made, lambda s: len(self._ids(s)) <= length, 1)
        if sample is None:
            raise ValueError(f"no chat fits in {length} tokens")
        return sample

    @cached_property
    def _prose(self) -> list[int]:
        return self._server.tokens(english())


class Work:
    """Makes the jobs of one server.

    `base`: fields of every key. `live`: further fields of evicting settings' keys. `eos`: token ids
    that end an answer.
    """

    def __init__(
        self, server: QualityServer, log: Log, base: Key, live: Key, eos: frozenset[int]
    ) -> None:
        self.server, self.log, self.prompts = server, log, Prompts(server)
        self.base, self.live, self.eos = base, live, eos

    def _key(self, setting: Setting, **facts: Any) -> Key:
        live = {} if setting.full else self.live
        return self.base | live | facts | setting.key()

    # ------------------------------------------------------------ tasks

    def task(
        self, task: str, length: int, question: Question, setting: Setting, number: int
    ) -> Job:
        """Value: `score`, 0 to 1; `chance`; or `none`: why the policy cannot run it."""
        question = "aware" if setting.full else question  # without eviction both are equal
        facts = {"what": "task", "task": task, "length": length, "number": number}
        num_new = TASKS[task].num_new
        return Job(
            self._key(setting, question=question, **facts),
            length + DECODE_COST * num_new,
            lambda: self._task(task, length, number, question, setting),
        )

    def _task(
        self, task: str, length: int, number: int, question: Question, setting: Setting
    ) -> Any:
        prompt = self.prompts.of(task, length, number)
        if not setting.fits(len(prompt.ids)):
            return {"none": "budget"}
        num_new = TASKS[task].num_new
        arguments = setting.arguments(len(prompt.ids))
        if question == "aware":
            ids = self.server.complete(prompt.ids, num_new, arguments).ids
        else:
            at = prompt.question_at
            later = prompt.ids[at:]
            # The question contains tokens that end an answer: those that end the user's turn.
            found = self.server.complete(
                prompt.ids[:at], len(later) + num_new, arguments, forced=later, ignore_eos=True
            )
            ids = found.ids[len(later) :]
        text = self.server.text(self._ended(ids))
        gold = prompt.sample.gold
        score = string_match_all(text, gold)
        return {"score": score, "chance": prompt.sample.chance, "text": text, "gold": gold}

    def _ended(self, ids: list[int]) -> list[int]:
        """`ids` up to the first token that ends an answer."""
        ends = (i for i, token in enumerate(ids) if token in self.eos)
        return ids[: next(ends, len(ids))]

    # ------------------------------------------------------------ continuations

    def reference(self, kind: Kind, length: int, num_new: int, number: int) -> Job:
        """The full cache's own continuation: token ids, log-probabilities, likeliest tokens."""
        facts = {"what": kind, "length": length, "new": num_new, "number": number}
        return Job(
            self._key(FULL, **facts),
            length + DECODE_COST * num_new,
            lambda: self._reference(kind, length, num_new, number),
        )

    def _reference(self, kind: Kind, length: int, num_new: int, number: int) -> Any:
        prompt = self.prompts.of(kind, length - num_new, number).ids
        found = self.server.complete(
            prompt,
            num_new,
            FULL.arguments(len(prompt)),
            num_top=NUM_TOP,
            ignore_eos=kind == "prose",
        )
        tops = [[list(top), [round(p, 5) for p in top.values()]] for top in found.tops]
        return {"ids": found.ids, "logprobs": found.chosen, "tops": tops}

    def continuation(
        self, kind: Kind, length: int, num_new: int, setting: Setting, number: int
    ) -> Job:
        """Value: see `_continuation`."""
        facts = {"what": kind, "length": length, "new": num_new, "number": number}
        return Job(
            self._key(setting, **facts),
            3 * length + 2 * DECODE_COST * num_new,
            lambda: self._continuation(kind, length, num_new, number, setting),
        )

    def _continuation(
        self, kind: Kind, length: int, num_new: int, number: int, setting: Setting
    ) -> Any:
        """Means over the tokens of one continuation.

        On the full cache's text, forced: `kl` [nats], `first` (same first choice), `nll`, and
        `full_nll`, the full cache's own. On the evicted run's own text: `equal`, `rouge`, `longer`
        (length ratio), `judged` (its nll under the full cache), `agree` (it is the full cache's
        first choice), `repeats`. The first token is left out: nothing is evicted before it.
        """
        full = self.log.get(self.reference(kind, length, num_new, number).key)
        prompt = self.prompts.of(kind, length - num_new, number).ids
        if not setting.fits(len(prompt)):
            return {"none": "budget"}
        ids: list[int] = full["ids"]
        if len(ids) < 2:
            return {"none": "the full cache answers with one token"}
        arguments = setting.arguments(len(prompt))
        forced = self.server.complete(
            prompt, len(ids), arguments, forced=ids, num_top=NUM_TOP, ignore_eos=True
        )
        tops = [dict(zip(*top, strict=True)) for top in full["tops"][1:]]
        own = self.server.complete(prompt, num_new, arguments, ignore_eos=kind == "prose").ids
        scored = self.server.complete(
            prompt + own, 1, FULL.arguments(len(prompt)), score_prompt=True
        )
        own_scores = scored.prompt[len(prompt) :]
        pairs = list(zip(tops, forced.tops[1:], strict=True))
        texts = [self.server.text(self._ended(tokens)).split() for tokens in (own, ids)]
        return {
            "kl": _mean(divergence(a, b) for a, b in pairs),
            "first": _mean(first(a) == first(b) for a, b in pairs),
            "nll": -_mean(forced.chosen[1:]),
            "full_nll": -_mean(full["logprobs"][1:]),
            "equal": equal_share(own[1:], ids[1:]),
            "rouge": rouge_l(*texts),
            "longer": len(own) / len(ids),
            "judged": -_mean(logprob for logprob, _ in own_scores) if own_scores else 0.0,
            "agree": _mean(rank == 1 for _, rank in own_scores) if own_scores else 1.0,
            "repeats": repetition(own),
            "full_repeats": repetition(ids),
        }

    # ------------------------------------------------------------ the same tokens

    def exact(self, variant: str, length: int, num_new: int, setting: Setting) -> Job:
        """The tokens of one greedy continuation under one way to reclaim memory."""
        facts = {"what": "exact", "variant": variant, "length": length, "new": num_new}
        return Job(
            self._key(setting, **facts),
            length + DECODE_COST * num_new,
            lambda: self._exact(length, num_new, setting),
        )

    def _exact(self, length: int, num_new: int, setting: Setting) -> Any:
        prompt = self.prompts.of("prose", length - num_new, 0).ids
        arguments = setting.arguments(len(prompt))
        return {"ids": self.server.complete(prompt, num_new, arguments, ignore_eos=True).ids}


def _mean(values: Any) -> float:
    found = list(values)
    return float(sum(found) / len(found))
