"""Finds the parts of a chat prompt: the template's own tokens, system prompt, last user turn.

The template is a function that renders a chat into token ids. Its tokens are inferred from a few
small chats, so this module contains no chat format. Spans are [start, end) of token ids.

A turn begins with its role header. A prompt that the inferred template does not match has no parts:
it is not a chat, or another template rendered it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Ints

Span = tuple[int, int]
Spans = tuple[Span, ...]
Message = dict[str, str]
Render = Callable[[list[Message], bool], Sequence[int]]  # messages, add the answer's role header

# Contents that differ in their first and last token. The last one begins with white space, which a
# tokenizer may merge with white space of the template.
CONTENTS = ("alpha", "7 omega.", "\n\nbeta")


class PromptParts(NamedTuple):
    """The spans of one prompt, in the order in which they are protected."""

    template: Spans = ()  # all before the first content; the role header of the answer
    system: Spans = ()
    last_user: Spans = ()  # from its role header to the answer's, or to the prompt's end


NO_PARTS = PromptParts()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The fixed token sequences of a chat template.

    `head`, `opening`: the tokens before the first content, of a chat that begins with a system
    prompt and of one that begins with the user. `user`, `assistant`: role headers.
    """

    head: tuple[int, ...]
    opening: tuple[int, ...]
    user: tuple[int, ...]
    assistant: tuple[int, ...]

    def find(self, ids: Ints) -> PromptParts:
        """The parts of the prompt `ids` [n]."""
        users = _occurrences(ids, self.user)
        if not users:
            return NO_PARTS
        answers = _occurrences(ids, self.assistant)
        first, last = users[0], users[-1]
        head = _num_common(ids, self.head)  # shorter than the head if that contains the date
        has_head = bool(self.head) and head == len(self.head)
        has_opening = _num_common(ids, self.opening) == len(self.opening)
        system: Spans = ()
        if first <= head or (has_opening and not has_head):
            head = first + len(self.user)  # no system prompt, or the template has none
        elif head:
            end = min([first, *(at for at in answers if at >= head)])
            system = ((head, end),) if end > head else ()
        template: Spans = ((0, head),) if head else ()
        answer = next((at for at in answers if at > last), None)
        if answer is not None:
            template += ((answer, answer + len(self.assistant)),)
        return PromptParts(template, system, ((last, len(ids) if answer is None else answer),))


def learn_template(render: Render) -> ChatTemplate | None:
    """The token sequences of `render`; None if its role headers cannot be distinguished.

    `render` may raise for a chat that the template refuses.
    """

    def around(before: list[Message], role: str, after: list[Message]) -> tuple[Ints, Ints]:
        """The tokens before and after the content of a turn that no content changes."""
        chats = [
            np.asarray(render([*before, _message(role, text), *after], False), dtype=np.int64)
            for text in CONTENTS
        ]
        return _common_start(*chats), _common_start(*(chat[::-1] for chat in chats))[::-1]

    question, reply = _message("user", "one two"), _message("assistant", "three four")
    first_user, tail = around([], "user", [])
    later_user, _ = around([question, reply], "user", [])
    first_answer, last = around([question], "assistant", [])
    later_answer, _ = around([question, reply, _message("user", "five")], "assistant", [])
    end = _common_start(last, around([question], "assistant", [question])[1])  # of a turn
    user = _without(end, _common_end(first_user, later_user))
    assistant = _without(end, _common_end(first_answer, later_answer))
    chat = np.asarray(render([question], False), dtype=np.int64)
    prompt = np.asarray(render([question], True), dtype=np.int64)
    generation = _without(end, prompt[_num_common(prompt, chat) :])
    shared = _common_start(assistant, generation if len(generation) else tail)
    if len(shared):  # some templates put more tokens into earlier turns
        assistant = shared
    try:
        head, _ = around([], "system", [question])
    except Exception:  # templates refuse the role with any exception
        head = first_user[:0]
    if not len(user) or not len(assistant) or np.array_equal(user, assistant):
        return None
    return ChatTemplate(*(tuple(part.tolist()) for part in (head, first_user, user, assistant)))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _num_common(a: Ints, b: Sequence[int] | Ints) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != np.asarray(b[:n], dtype=np.int64))
    return int(differs[0]) if len(differs) else n


def _common_start(first: Ints, *others: Ints) -> Ints:
    return first[: min((_num_common(first, other) for other in others), default=len(first))]


def _common_end(a: Ints, b: Ints) -> Ints:
    return _common_start(a[::-1], b[::-1])[::-1]


def _without(end_of_turn: Ints, header: Ints) -> Ints:
    """`header` without the end of the previous turn."""
    n = len(end_of_turn)
    return header[n:] if np.array_equal(header[:n], end_of_turn) else header


def _occurrences(ids: Ints, part: tuple[int, ...]) -> list[int]:
    """Where `part` begins in `ids`, ascending."""
    found = np.flatnonzero(ids[: max(0, len(ids) - len(part) + 1)] == part[0])
    for offset, token in enumerate(part[1:], 1):
        found = found[ids[found + offset] == token]
    starts: list[int] = found.tolist()
    return starts
