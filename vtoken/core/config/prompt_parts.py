"""Finds the parts of a chat prompt: the template's own, system prompt, tools, last user turn.

The template is a function that renders a chat into token ids. Its tokens are inferred from a few
small chats, so this module contains no chat format. Spans are [start, end) of token ids.

1. A turn begins with its role header. A prompt that the inferred template does not match has no
   parts: it is not a chat, or another template rendered it.
2. The tools are what the template adds for `tools`. The other parts are those of the prompt
   without it, wherever the template puts it.
3. A result of a tool is no user turn, also where the template renders it with the user's header.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.rendering import CALL, CONTENTS, RESULT, Message, Render, message, rendered
from vtoken.core.config.token_sequences import (
    Span,
    Spans,
    begins,
    common_end,
    common_start,
    num_common,
    occurrences,
)
from vtoken.core.config.tool_marks import ToolMarks, learn_tools, turns_of


class PromptParts(NamedTuple):
    """The spans of one prompt, in the order in which they are protected."""

    template: Spans = ()  # all before the first content; the role header of the answer
    system: Spans = ()
    tools: Spans = ()  # what the template adds for them: instructions and schemas
    last_user: Spans = ()  # from its role header to the answer's, or to the prompt's end


NO_PARTS = PromptParts()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The fixed token sequences of a chat template.

    `head`, `opening`: the tokens before the first content, of a chat that begins with a system
    prompt and of one that begins with the user. `user`, `assistant`: role headers. `result`: the
    tokens before a result of a tool, if they begin with the user's header. `tools`: None if the
    template has no place for them.
    """

    head: tuple[int, ...]
    opening: tuple[int, ...]
    user: tuple[int, ...]
    assistant: tuple[int, ...]
    result: tuple[int, ...] = ()
    tools: ToolMarks | None = None

    def find(self, ids: Ints) -> PromptParts:
        """The parts of the prompt `ids` [n]."""
        turns = turns_of(ids, [self.user, self.assistant])
        tools = () if self.tools is None else self.tools.find(ids, turns)
        if not tools:
            return self._find(ids)
        others = np.ones(len(ids), dtype=np.bool_)
        for start, end in tools:
            others[start:end] = False
        places = np.flatnonzero(others)
        parts = self._find(ids[places])
        return PromptParts(*(_at(places, spans) for spans in parts))._replace(tools=tools)

    def _find(self, ids: Ints) -> PromptParts:
        """The parts of a prompt without tools."""
        users = occurrences(ids, self.user)
        if not users:
            return NO_PARTS
        answers = occurrences(ids, self.assistant)
        results = occurrences(ids, self.result)
        first = users[0]
        head = num_common(ids, self.head)  # shorter than the head if that contains the date
        has_head = bool(self.head) and head == len(self.head)
        if first <= head or (begins(ids, self.opening) and not has_head):
            head = first + len(self.user)  # no system prompt, or the template has none
            system: Spans = ()
        else:
            end = min([first, *(at for at in answers if at >= head)])
            system = ((head, end),) if end > head > 0 else ()
        template: Spans = ((0, head),) if head else ()
        if answers and answers[-1] > users[-1]:
            template += ((answers[-1], answers[-1] + len(self.assistant)),)
        last_user: Spans = ()
        questions = [at for at in users if at not in results]
        if questions:
            last = questions[-1]
            turns = [at for at in (*users, *answers) if at > last]
            last_user = ((last, min([len(ids), *turns])),)
        return PromptParts(template, system, last_user=last_user)


def learn_template(render: Render) -> ChatTemplate | None:
    """The token sequences of `render`; None if its role headers cannot be distinguished."""

    def around(before: list[Message], turn: Message, after: list[Message]) -> tuple[Ints, Ints]:
        """The tokens before and after the content of a `turn` that no content changes."""
        chats = [rendered(render, [*before, turn | {"content": text}, *after]) for text in CONTENTS]
        return common_start(*chats), common_end(*chats)

    asks, answers = {"role": "user"}, {"role": "assistant"}
    question, reply = message("user", "one two"), message("assistant", "three four")
    first_user, tail = around([], asks, [])
    later_user, _ = around([question, reply], asks, [])
    first_answer, last = around([question], answers, [])
    later_answer, _ = around([question, reply, message("user", "five")], answers, [])
    end = common_start(last, around([question], answers, [question])[1])  # of a turn
    user = _without(end, common_end(first_user, later_user))
    assistant = _without(end, common_end(first_answer, later_answer))
    chat, prompt = rendered(render, [question]), rendered(render, [question], is_prompt=True)
    generation = _without(end, prompt[num_common(prompt, chat) :])
    shared = common_start(assistant, generation if len(generation) else tail)
    if len(shared):  # some templates put more tokens into earlier turns
        assistant = shared
    elif occurrences(assistant, generation):  # others have a channel, or another end of a turn
        assistant = generation
    head = before_result = first_user[:0]
    with suppress(Exception):  # templates refuse a role with any exception
        head, _ = around([], {"role": "system"}, [question])
    with suppress(Exception):
        before_result, _ = around([question, CALL], RESULT, [])
    if not len(user) or not len(assistant) or np.array_equal(user, assistant):
        return None
    result = _result_header(before_result, user)
    tools = learn_tools(render, [user, assistant])
    parts = head, first_user, user, assistant, result
    head_ids, opening, user_ids, assistant_ids, result_ids = (
        tuple(part.tolist()) for part in parts
    )
    return ChatTemplate(head_ids, opening, user_ids, assistant_ids, result_ids, tools)


def _result_header(before: Ints, user: Ints) -> Ints:
    """The header of a result of a tool; none if it is not the `user`'s and more.

    `before`: the tokens before a result, of a chat with one user turn.
    """
    headers = occurrences(before, user)
    if len(headers) < 2 or headers[-1] + len(user) == len(before):
        return before[:0]
    return before[headers[-1] :]


def _at(places: Ints, spans: Spans) -> Spans:
    """`spans` of the tokens at the ascending `places` [k], as spans of places."""
    found: list[Span] = []
    for start, end in spans:
        own = places[start:end]
        runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
        found += [(int(run[0]), int(run[-1]) + 1) for run in runs]
    return tuple(found)


def _without(end_of_turn: Ints, header: Ints) -> Ints:
    """`header` without the end of the previous turn."""
    n = len(end_of_turn)
    return header[n:] if np.array_equal(header[:n], end_of_turn) else header
