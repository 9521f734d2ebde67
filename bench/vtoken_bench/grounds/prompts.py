"""Prompts: a fact in a text, and the question, as a chat asks it.

They share no text, no kind of fact and no phrasing with those on which parameters of policies were
tuned. No prompt but those of the case `prefix` contains the beginning of an answer.

    chat     text and question in one user turn
    prefix   the same, and the beginning of the answer
    before   the question, then the text
    turns    the text in two turns, the question in a third
    later    as `chat`, but the text is evicted before the question comes
    long     a text, 544 tokens of output that continue it, then the question; facts are in both
    tools    ten schemas, two calls with their results, then the request for a third call

A base model has no chat template. Its prompts are plain text, and in all cases the answer is begun.

`PromptMaker.questions` makes a prompt with several facts, whose questions come one after the other
at the end of a long output; `PromptMaker.chat` makes the prompts of a chat of several turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from vtoken.core.config.prompt_parts import NO_PARTS, ChatTemplate, PromptParts, learn_template
from vtoken_bench.forcing import FREE
from vtoken_bench.grounds import tools
from vtoken_bench.grounds.facts import FACTS, Fact
from vtoken_bench.grounds.texts import docstrings

Case = Literal["chat", "prefix", "before", "turns", "later", "long", "tools"]
CASES: tuple[Case, ...] = get_args(Case)
OUTPUT_TOKENS = 544  # of the case `long`, before its question
SPARE_TOKENS = 60  # by which a text may be shorter than it should
GOLDEN = 0.618034  # spreads the depths of any number of samples evenly
Message = dict[str, str]


# The sentences around text and question.
TEXT_FIRST = "These are my notes:"
QUESTION_FIRST = "Please answer one question about the notes below, in one sentence. "
PART = "This is a part of my notes:"
READ = "Thank you, I have read this part."  # the model's turn after a part
CONTINUE = "Please continue my notes."  # the request for a long output


@dataclass(frozen=True)
class Prompt:
    """One sample of one case.

    `ids`: the prompt. `forced`: tokens that are forced after it, the question last. `answer`:
    indices in `ids` of the tokens that spell the gold strings where the fact is stated; none if
    the fact is in `forced`. `free`: indices in `forced` of the tokens that are the answer; none if
    the answer follows `forced`. `parts`: of `ids`, where tools are among them.
    """

    ids: list[int]
    forced: list[int]
    fact: Fact
    answer: list[int]
    free: list[int] = field(default_factory=list)
    parts: PromptParts = NO_PARTS


@dataclass(frozen=True)
class Questions:
    """A prompt that states `facts`, and the output in which they are asked for, last.

    `forced`: the output, `FREE` where the model answers. `answers`: for each fact the indices
    [begin, end) of its answer in the output.
    """

    ids: list[int]
    forced: list[int]
    facts: list[Fact]
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class Chat:
    """`prompts`: of each turn, the turns before it included, whose answers are the statements of
    their facts. So each prompt begins with the one before, whatever a model answered. `facts`: what
    each turn asks for.
    """

    prompts: list[list[int]]
    facts: list[Fact]


class PromptMaker:
    """Makes the prompts for one tokenizer; equal arguments give equal prompts."""

    def __init__(self, tokenizer: Any, *, seed: int, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._seed, self._num_tokens = seed, num_tokens
        self._paragraphs = docstrings()

    @property
    def tool_template(self) -> str:
        """The chat template of the case `tools`."""
        begin = "" if self.chats else f"{{{{- '{self._tokenizer.bos_token or ''}' }}}}"
        return begin + tools.TEMPLATE

    @cached_property
    def _tool_parts(self) -> ChatTemplate:
        def render(messages: Any, is_prompt: bool, offered: Any) -> list[int]:
            return self.ids(self._with_tools(messages, offered, is_prompt=is_prompt))

        found = learn_template(render)
        assert found is not None
        return found

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.chat_template is not None

    def prompt(self, case: Case, number: int) -> Prompt:
        """Sample `number`: its kind of fact and its depth follow from the number."""
        rng = random.Random(f"test/{self._seed}/{number}")
        kinds = [*FACTS]
        fact = FACTS[kinds[number % len(kinds)]](rng)
        depth = (number * GOLDEN + 0.5 * GOLDEN) % 1.0
        if case == "tools":
            return self._tools(random.Random(f"tools/{self._seed}/{number}"))
        if case == "long":
            return self._long(rng, fact, depth, in_output=number // len(kinds) % 2 == 1)
        text = _with(self._passage(rng, self._num_tokens), fact.statement, depth)
        begun = case == "prefix" or not self.chats
        whole = self._render(self._messages(case, text, fact), fact.prefix if begun else "")
        ids, answer = self._located(whole, fact)
        if case != "later":
            return Prompt(ids, [], fact, answer)
        at = whole.rindex(fact.question)
        before = len(self._encoded(whole[:at].rstrip())["input_ids"])
        return Prompt(ids[:before], ids[before:], fact, answer)

    def questions(self, number: int, num_output: int, num_answer: int) -> Questions:
        """Sample `number`: one fact of each kind in the prompt, about `num_output` tokens of output
        that continue it, and then each question, whose answer goes on for `num_answer` tokens after
        its forced beginning.
        """
        rng = random.Random(f"questions/{self._seed}/{number}")
        facts = [draw(rng) for draw in FACTS.values()]
        rng.shuffle(facts)
        text = self._passage(rng, self._num_tokens)
        for place, fact in enumerate(facts):
            text = _with(text, fact.statement, (place + 0.5) / len(facts))
        turns = [_user(f"{CONTINUE}\n\n{' '.join(text)}")]
        whole = self._render(turns, "")
        ids, forced, answers = self.ids(whole), list[int](), list[tuple[int, int]]()
        said = " ".join(self._passage(rng, num_output))
        for fact in facts:
            turns += [{"role": "assistant", "content": said}, _user(fact.question)]
            longer, said = self._render(turns, fact.prefix), fact.prefix
            assert longer.startswith(whole)
            forced += self.ids(longer[len(whole) :])
            answers.append((len(forced), len(forced) + num_answer))
            forced += [FREE] * num_answer
            whole = longer
        return Questions(ids, forced, facts, answers)

    def chat(self, number: int, sources: Sequence[int]) -> Chat:
        """Chat `number`: a text in every turn, and a question. What turn `n` asks for is stated in
        the text of turn `sources[n]`, and nowhere else until it is answered. Every turn asks for
        another kind of fact, so there are no more turns than kinds.
        """
        rng, kinds = random.Random(f"chat/{self._seed}/{number}"), [*FACTS]
        first = number // len(kinds)
        facts = [FACTS[kinds[(first + turn) % len(kinds)]](rng) for turn in range(len(sources))]
        messages, prompts = list[Message](), list[list[int]]()
        for turn, asked in enumerate(facts):
            stated = [fact for fact, source in zip(facts, sources, strict=True) if source == turn]
            rng.shuffle(stated)
            text = self._passage(rng, self._num_tokens)
            for place, fact in enumerate(stated):
                text = _with(text, fact.statement, (place + 0.5) / len(stated))
            messages.append(_user(f"{PART}\n\n{' '.join(text)}\n\n{asked.question}"))
            prompts.append(self.ids(self._render(messages, "" if self.chats else asked.prefix)))
            messages.append({"role": "assistant", "content": asked.statement})
        return Chat(prompts, facts)

    def answer_text(self, ids: Sequence[int]) -> str:
        """The text of an output up to the end of its turn."""
        end = self._tokenizer.eos_token_id
        ended = ids[: ids.index(end)] if end in ids else ids
        text: str = self._tokenizer.decode(ended)
        return text

    def turn(self, text: str) -> str:
        """The same of an output as text, special tokens included."""
        end: str = self._tokenizer.eos_token
        return text.partition(end)[0]

    def text(self, ids: Sequence[int]) -> str:
        """A prompt as text that encodes to `ids`. Raises ValueError where it would not."""
        num_added = len(self._tokenizer("")["input_ids"])  # <bos>, where the tokenizer adds it
        text: str = self._tokenizer.decode(ids[num_added:])
        if self._tokenizer(text)["input_ids"] != list(ids):
            raise ValueError("the text of a prompt encodes to other tokens than the prompt's")
        return text

    def _messages(self, case: Case, text: Sequence[str], fact: Fact) -> list[Message]:
        if case == "before":
            return [_user(f"{QUESTION_FIRST}{fact.question}\n\n{' '.join(text)}")]
        if case == "turns":
            half = len(text) // 2
            read = {"role": "assistant", "content": READ}
            parts = [_user(f"{PART} {' '.join(p)}") for p in (text[:half], text[half:])]
            return [parts[0], read, parts[1], read, _user(fact.question)]
        return [_user(f"{TEXT_FIRST}\n\n{' '.join(text)}\n\n{fact.question}")]

    def _long(self, rng: random.Random, fact: Fact, depth: float, *, in_output: bool) -> Prompt:
        """The other of prompt and output states a fact of the same kind that is not asked for."""
        other = fact
        while other.question == fact.question:
            other = FACTS[fact.kind](rng)
        first, second = (other, fact) if in_output else (fact, other)
        text = " ".join(_with(self._passage(rng, self._num_tokens), first.statement, depth))
        output = " ".join(_with(self._passage(rng, OUTPUT_TOKENS), second.statement, depth))
        request = _user(f"{CONTINUE}\n\n{text}")
        start = self._render([request], "")
        turns = [request, {"role": "assistant", "content": output}, _user(fact.question)]
        whole = self._render(turns, "" if self.chats else fact.prefix)
        assert whole.startswith(start)
        ids, answer = self._located(start, first)
        return Prompt(ids, self.ids(whole)[len(ids) :], fact, [] if in_output else answer)

    def _tools(self, rng: random.Random) -> Prompt:
        """The tool that is asked for last was not called before. Its call is forced but for the
        names of its parameters, which stand in its schema alone.
        """
        offered = tools.toolbox(rng)
        asked = rng.sample(offered, tools.NUM_ROUNDS)
        length = self._num_tokens // (tools.NUM_ROUNDS - 1)
        results = [" ".join(self._passage(rng, length)) for _ in asked[1:]]
        schemas = [tool.schema for tool in offered]
        whole = self._with_tools(tools.rounds(asked, results), schemas, is_prompt=False)
        tool = asked[-1]
        begin = whole.rindex(tools.CALL)
        spans, end = [], whole.index(tools.PARAMETERS, begin)
        for name in tool.arguments:
            start = whole.index(name, end)
            end = start + len(name)
            spans.append((start, end))
        ids, named = self._spelled(whole, spans)
        first, last = len(self.ids(whole[:begin])), named[-1] + 1
        names = tuple(tool.arguments)
        fact = Fact("call", tools.line(tool), tool.request, whole[begin : spans[0][0]], names)
        _, stated = self._located(whole, fact)
        free = [token - first for token in named]
        forced = [FREE if at in free else token for at, token in enumerate(ids[first:last])]
        parts = self._tool_parts.find(np.array(ids[:first]))
        return Prompt(ids[:first], forced, fact, stated, free, parts)

    def _with_tools(self, messages: list[Any], offered: Sequence[Any], *, is_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=[*offered] or None,
            chat_template=self.tool_template,
            tokenize=False,
            add_generation_prompt=is_prompt,
        )
        return text

    def _passage(self, rng: random.Random, num_tokens: int) -> list[str]:
        """Consecutive paragraphs of about `num_tokens` tokens in total."""
        place, found, size = rng.randrange(len(self._paragraphs)), [], 0
        for number in range(len(self._paragraphs)):
            paragraph = self._paragraphs[(place + number) % len(self._paragraphs)]
            length = len(self.ids(paragraph))
            if length <= num_tokens // 4 and size + length <= 1.05 * num_tokens:
                found.append(paragraph)
                size += length
            elif num_tokens - size < SPARE_TOKENS:
                break
            if size >= num_tokens:
                break
        return found

    def _located(self, whole: str, fact: Fact) -> tuple[list[int], list[int]]:
        """The token ids of `whole`, and the indices of those that spell the gold strings."""
        start = whole.index(fact.statement)
        spans = [(at := start + fact.statement.index(gold), at + len(gold)) for gold in fact.gold]
        return self._spelled(whole, spans)

    def _spelled(self, whole: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """The token ids of `whole`, and the indices of those with characters of `spans`."""
        encoded = self._encoded(whole)
        tokens = [
            token
            for token, (begin, end) in enumerate(encoded["offset_mapping"])
            if any(begin < last and end > first for first, last in spans)
        ]
        return encoded["input_ids"], tokens

    def _render(self, messages: list[Message], answer: str) -> str:
        """`messages` in the chat template, up to where the model's answer begins; without a
        template, their plain text.
        """
        if not self.chats:
            plain = "\n\n".join(message["content"] for message in messages)
            return f"{self._tokenizer.bos_token or ''}{plain}\n\n{answer}"
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text + answer

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without any that the tokenizer adds."""
        ids: list[int] = self._encoded(text)["input_ids"]
        return ids

    def _encoded(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _with(passage: list[str], statement: str, depth: float) -> list[str]:
    """`passage` with the paragraph `statement` at the share `depth` of its characters."""
    total = sum(map(len, passage))
    before = place = 0
    while place < len(passage) and before + len(passage[place]) / 2 < depth * total:
        before += len(passage[place])
        place += 1
    return [*passage[:place], statement, *passage[place:]]
