"""Where the parts of a chat prompt are: the template's own tokens, system prompt, last user turn.

Knows token ids only. The template is a function that renders a chat into token ids, and is learned
from a few small chats, so no format is written down here. Spans are [start, end) of token ids.

A turn begins with its role header. What the learned template does not match has no parts: a prompt
that is no chat, or a chat that another template rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vtoken.arrays import Ints

Span = tuple[int, int]
Spans = tuple[Span, ...]
Message = dict[str, str]
Render = Callable[[list[Message], bool], Sequence[int]]  # messages, whether an answer is to follow

# Contents that differ in their first and last token. The last one begins with white space, which a
# tokenizer may join with the template's own.
CONTENTS = ("alpha", "7 omega.", "\n\nbeta")


class PromptParts(NamedTuple):
    """The spans of one prompt, in the order in which they are protected."""

    template: Spans = ()  # what comes before the first content; the header that the answer follows
    system: Spans = ()
    last_user: Spans = ()  # from its role header to the answer's, or to the prompt's end


NO_PARTS = PromptParts()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`head`, `opening`: what comes before the first content of a chat with a system prompt, and of
    one that begins with the user; `user`, `assistant`: their role headers.
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
        head = _num_common(ids, self.head)  # less than all of it where the head tells the date
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
    """The template behind `render`; None where its roles cannot be told apart.

    `render` may raise for a chat that the template refuses.
    """

    def around(before: list[Message], role: str, after: list[Message]) -> tuple[Ints, Ints]:
        """The tokens that surround the content of a turn, whatever the content is."""
        chats = [
            np.asarray(render([*before, _message(role, text), *after], False), dtype=np.int64)
            for text in CONTENTS
        ]
        return _common_start(*chats), _common_start(*(chat[::-1] for chat in chats))[::-1]

    ask, say = _message("user", "one two"), _message("assistant", "three four")
    first_user, tail = around([], "user", [])
    later_user, _ = around([ask, say], "user", [])
    first_answer, last = around([ask], "assistant", [])
    later_answer, _ = around([ask, say, _message("user", "five")], "assistant", [])
    end = _common_start(last, around([ask], "assistant", [ask])[1])  # of a turn
    user = _without(end, _common_end(first_user, later_user))
    assistant = _without(end, _common_end(first_answer, later_answer))
    asked = np.asarray(render([ask], False), dtype=np.int64)
    prompt = np.asarray(render([ask], True), dtype=np.int64)
    generation = _without(end, prompt[_num_common(prompt, asked) :])
    shared = _common_start(assistant, generation if len(generation) else tail)
    if len(shared):  # some templates put more into the turns of the past
        assistant = shared
    try:
        head, _ = around([], "system", [ask])
    except Exception:  # templates may refuse the role in their own way
        head = first_user[:0]
    if not len(user) or not len(assistant) or np.array_equal(user, assistant):
        return None
    return ChatTemplate(*(tuple(part.tolist()) for part in (head, first_user, user, assistant)))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _num_common(a: Ints, b: Sequence[int] | Ints) -> int:
    """How many tokens both begin with."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != np.asarray(b[:n], dtype=np.int64))
    return int(differs[0]) if len(differs) else n


def _common_start(first: Ints, *others: Ints) -> Ints:
    return first[: min((_num_common(first, other) for other in others), default=len(first))]


def _common_end(a: Ints, b: Ints) -> Ints:
    return _common_start(a[::-1], b[::-1])[::-1]


def _without(end_of_turn: Ints, header: Ints) -> Ints:
    """`header` without what ended the turn before it."""
    n = len(end_of_turn)
    return header[n:] if np.array_equal(header[:n], end_of_turn) else header


def _occurrences(ids: Ints, part: tuple[int, ...]) -> list[int]:
    """Where `part` begins in `ids`, ascending."""
    found = np.flatnonzero(ids[: max(0, len(ids) - len(part) + 1)] == part[0])
    for offset, token in enumerate(part[1:], 1):
        found = found[ids[found + offset] == token]
    places: list[int] = found.tolist()
    return places
