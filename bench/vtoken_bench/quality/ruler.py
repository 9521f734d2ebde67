"""RULER's tasks, generated at any length: https://github.com/NVIDIA/RULER (arXiv 2404.06654).

Prompts, numbers of needles, hops and words are RULER's. Differences: the prose is Python's
reference, from a seeded random position, instead of Paul Graham's essays; the words are those of
that reference instead of wonderwords'; the size of the haystack is searched for every sample, not
once per task. The caller counts the tokens of a sample.
"""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, Protocol

from vtoken_bench.texts import english

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40  # possible positions of a needle, from the first sentence to the last
HOPS = 4
COMMON_WORDS = 10
LONG_TOKENS = 4096  # from this length on, cwe repeats its words more often
CODED_LETTERS = 6
_ADJECTIVES = """
able ample blunt brave brisk calm clever cold coral curly damp dear early eager faint fancy
fierce gentle glad grand happy hollow humble jolly keen large lively lucky mellow misty noble
odd pale plain proud quiet rapid rare rough round rusty shiny silent slow smart solid spicy
steep sunny tall thick tidy tiny vast warm weary wild wise young zany
"""
_NOUNS = """
acorn anchor apple arrow badge barrel basket beacon bottle branch bridge bucket candle canyon
carpet castle cedar cellar circus cliff copper cottage desert dragon engine feather fiddle
forest garden glacier hammer harbor island jacket jungle kettle ladder lantern lemon magnet
marble meadow mirror mountain needle ocean orchard paddle pebble pencil pillow planet pocket
quartz ribbon river rocket saddle shadow shelter spider stable summit temple thunder tunnel
valley velvet village violin wagon walnut window winter zebra
"""
ADJECTIVES, NOUNS = (words.split() for words in (_ADJECTIVES, _NOUNS))


@dataclass(frozen=True)
class Sample:
    """A prompt in parts: context, question and the beginning of the answer.

    `gold`: strings that the answer must contain. `chance`: the share of them that guessing among
    the words of the prompt finds.
    """

    context: str
    question: str
    answer_prefix: str
    gold: tuple[str, ...]
    chance: float = 0.0


class Task(Protocol):
    """`num_new`: tokens to generate. `least_size`: of a haystack, in the task's own unit."""

    @property
    def num_new(self) -> int: ...
    @property
    def least_size(self) -> int: ...
    def build(self, rng: random.Random, size: int, length: int) -> Sample: ...


@dataclass(frozen=True)
class Needles:
    """Find the values of keys: `keys` keys with `values` values each, `queries` keys queried."""

    num_new: int
    haystack: Literal["prose", "noise", "needles"] = "prose"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: Literal["words", "uuids"] = "words"
    value_kind: Literal["numbers", "uuids"] = "numbers"
    least_size: int = 5

    def build(self, rng: random.Random, size: int, length: int) -> Sample:  # noqa: ARG002
        kind = self.value_kind
        keys: list[str] = []
        while len(keys) < max(self.keys, self.queries):
            keys += {_drawn(rng, self.key_kind)}.difference(keys)
        values = [[_drawn(rng, kind) for _ in range(self.values)] for _ in keys]
        needles = [_needle(kind, k, v) for k, vs in zip(keys, values, strict=True) for v in vs]
        rng.shuffle(needles)
        queried = rng.sample(range(len(keys)), self.queries)
        if self.haystack == "prose":
            context = _in_prose(rng, needles, size)
        else:
            filler = [NOISE] * size
            if self.haystack == "needles":
                others = [_drawn(rng, self.key_kind) for _ in filler]
                filler = [_needle(kind, k, _drawn(rng, kind)) for k in others if k not in keys]
            context = _among(rng, filler, needles)
        names = [keys[i] for i in queried]
        query = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
        one = self.queries * self.values == 1
        what, some, verb = (kind[:-1], "A", "is") if one else (kind, "Some", "are")
        hidden = f"{some} special magic {what} {verb} hidden within the following text."
        head = f"{hidden} Make sure to memorize it. I will quiz you about the {what} afterwards."
        question = f"What {verb}{'' if one else ' all'} the special magic {what} for {query}"
        return Sample(
            f"{head}\n{context}\n",
            f"{question} mentioned in the provided text?",
            f"The special magic {what} for {query} mentioned in the provided text {verb}",
            tuple(v for i in queried for v in values[i]),
        )


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _drawn(rng: random.Random, kind: str) -> str:
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(10**6, 10**7 - 1))


def _in_prose(rng: random.Random, needles: list[str], size: int) -> str:
    """`size` words of prose with the needles between its sentences, at distinct random depths."""
    words = prose()
    start = rng.randrange(len(words))
    depths = sorted(rng.sample(range(DEPTHS), len(needles)))
    text = " ".join(words[(start + i) % len(words)] for i in range(size))
    sentences = re.split(r"(?<=[.!?]) +", text)
    for depth, needle in reversed(list(zip(depths, needles, strict=True))):
        sentences.insert(round(len(sentences) * depth / (DEPTHS - 1)), needle)
    return " ".join(sentences)


def _among(rng: random.Random, filler: list[str], lines: list[str]) -> str:
    """`lines`, in order, at random places among the lines of `filler`."""
    places = sorted(rng.sample(range(len(filler)), len(lines)), reverse=True)
    for place, line in zip(places, reversed(lines), strict=True):
        filler.insert(place, line)
    return "\n".join(filler)


@dataclass(frozen=True)
class VariableTracking:
    """Follow one chain of assignments through noise; a worked example comes before."""

    num_new: int = 30
    least_size: int = HOPS + 1

    def build(self, rng: random.Random, size: int, length: int) -> Sample:  # noqa: ARG002
        example, names = self._chain(rng, 3, HOPS + 1)
        shown = f"{example.context}{example.question} {example.answer_prefix} {' '.join(names)}\n"
        found, names = self._chain(rng, 5, size)
        context = shown + found.context
        return Sample(context, found.question, found.answer_prefix, tuple(names))

    def _chain(self, rng: random.Random, letters: int, size: int) -> tuple[Sample, list[str]]:
        names: list[str] = []
        while len(names) <= HOPS:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if name not in names:
                names.append(name)
        value = rng.randint(10_000, 99_999)
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
        head = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
        )
        return (
            Sample(
                f"{head}\n\n{_among(rng, [NOISE] * size, chain)}\n",
                f"Question: Find all variables that are assigned the value {value} in the text "
                "above.",
                "Answer: According to the chain(s) of variable assignment in the text above, "
                f"{HOPS + 1} variables are assigned the value {value}, they are:",
                (),
            ),
            names,
        )


@dataclass(frozen=True)
class CommonWords:
    """Name the words of a numbered list that occur most often; a worked example comes before."""

    num_new: int = 120
    least_size: int = COMMON_WORDS + 1

    def build(self, rng: random.Random, size: int, length: int) -> Sample:
        long = length >= LONG_TOKENS
        example, words = self._list(rng, *((40, 10, 3) if long else (20, 3, 1)))
        answer = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        shown = f"{example.context}{example.question} {example.answer_prefix} {answer}\n"
        found, words = self._list(rng, size, *((30, 3) if long else (6, 1)))
        context, chance = shown + found.context, len(words) / size
        return Sample(context, found.question, found.answer_prefix, tuple(words), chance)

    def _list(
        self, rng: random.Random, size: int, common: int, uncommon: int
    ) -> tuple[Sample, list[str]]:
        known = vocabulary()
        if size > len(known):
            known = [*known, *(f"{a}-{n}" for a in ADJECTIVES for n in NOUNS)]
        if size > len(known):
            raise ValueError(f"cwe needs {size} words and has {len(known)}")
        drawn = rng.sample(known, size)
        words = drawn[:COMMON_WORDS] * common + drawn[COMMON_WORDS:] * uncommon
        rng.shuffle(words)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        return (
            Sample(
                "Below is a numbered list of words. In these words, some appear more often than "
                f"others. Memorize the ones that appear most often.\n{listed}\n",
                f"Question: What are the {COMMON_WORDS} most common words in the above list?",
                f"Answer: The top {COMMON_WORDS} words that appear most often in the list are:",
                (),
            ),
            drawn[:COMMON_WORDS],
        )


@dataclass(frozen=True)
class FrequentWords:
    """Name the coded words of ranks 2 to 4 by frequency; counts follow a zeta distribution."""

    num_new: int = 50
    least_size: int = 60

    def build(self, rng: random.Random, size: int, length: int) -> Sample:
        known = max(8, (length - self.num_new) // 50)
        coded: list[str] = []
        while len(coded) < known:
            word = "".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))
            if word not in coded:
                coded.append(word)
        coded[0] = "..."  # RULER: the most frequent one is noise
        zeta = math.pi**2 / 6  # zeta(2)
        counts = [int(size * rank**-2 / zeta) for rank in range(1, known + 1)]
        words = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        rng.shuffle(words)
        appear = sum(count > 0 for count in counts[1:])
        return Sample(
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(words)}\n",
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
            "three most frequently appeared words in the above coded text?",
            "Answer: According to the coded text above, the three most frequently appeared words "
            "are:",
            tuple(coded[1:4]),
            3 / appear,
        )


# RULER generates 128 tokens for needles. With the answer's prefix given, values need fewer.
TASKS: dict[str, Task] = {
    "niah_single_1": Needles(24, "noise"),
    "niah_single_2": Needles(24),
    "niah_single_3": Needles(64, value_kind="uuids"),
    "niah_multikey_1": Needles(24, keys=4),
    "niah_multikey_2": Needles(24, "needles"),
    "niah_multikey_3": Needles(64, "needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles(64, values=4),
    "niah_multiquery": Needles(96, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}


def fitted(name: str, number: int, length: int, count: Callable[[Sample], int]) -> Sample:
    """Sample `number` of a task: the largest whose `count` of tokens and new ones fit in `length`.

    Equal arguments give equal samples. Raises ValueError if the smallest does not fit.
    """
    task = TASKS[name]

    def made(size: int) -> Sample:
        return task.build(random.Random(f"{name}/{length}/{number}"), size, length)

    sample = largest(made, lambda sample: count(sample) + task.num_new <= length, task.least_size)
    if sample is None:
        raise ValueError(f"{name} does not fit in {length} tokens")
    return sample


def largest(
    made: Callable[[int], Sample], fits: Callable[[Sample], bool], least: int
) -> Sample | None:
    """The largest sample that fits, of size `least` or more; None if `least` does not fit."""
    low, high, found = least, 2 * least, None
    while fits(sample := made(high)):
        low, high, found = high + 1, 2 * high, sample
    while low < high:
        middle = (low + high) // 2
        if fits(sample := made(middle)):
            low, found = middle + 1, sample
        else:
            high = middle
    return found


@cache
def prose() -> list[str]:
    """The words of Python's reference."""
    return english().split()


@cache
def vocabulary() -> list[str]:
    """Plain words of 4 to 10 letters that the reference uses, each once."""
    return sorted(set(re.findall(r"(?<![\w.])[a-z]{4,10}(?![\w(])", english())))
