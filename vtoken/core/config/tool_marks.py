"""Finds the tools in a chat prompt: what the template adds to a prompt for `tools`.

What surrounds them is inferred from small chats that are rendered with and without tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.rendering import CONTENTS, TOOLS, Message, Render, message, rendered
from vtoken.core.config.token_sequences import (
    Part,
    Span,
    Spans,
    begins,
    common_end,
    common_start,
    num_common,
    occurrences,
)

QUESTION = message("user", "one two")


@dataclass(frozen=True, slots=True)
class ToolMarks:
    """The fixed token sequences around the tools of a prompt.

    `opening`: the last tokens before the first tool. `closing`: the first tokens behind the last
    tool; (): not known, the tools last until the next turn. `more`: if `closing` is behind every
    tool, the tokens that then begin another one.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...] = ()
    more: tuple[int, ...] = ()

    def find(self, ids: Ints, turns: Sequence[int]) -> Spans:
        """The tools of the prompt `ids` [n], whose turns begin at `turns`."""
        found: list[Span] = []
        closings = occurrences(ids, self.closing)
        for start in occurrences(ids, self.opening):
            if found and start < found[-1][1]:
                continue
            first_tool = start + len(self.opening)
            end = min([len(ids), *(at for at in turns if at >= first_tool)])
            for closing in [at for at in closings if first_tool <= at < end]:
                end = closing + len(self.closing)
                if not self.more or not begins(ids[end:], self.more):
                    break
            found.append((start, end))
        return tuple(found)


def turns_of(ids: Ints, headers: Sequence[Part]) -> list[int]:
    """Where a role header begins in `ids`, ascending."""
    return sorted(at for header in headers for at in occurrences(ids, header))


def _contents_of(ids: Ints, headers: Sequence[Part]) -> list[int]:
    """Where the content behind a role header begins in `ids`."""
    return [at + len(header) for header in headers for at in occurrences(ids, header)]


def learn_tools(render: Render, headers: Sequence[Part]) -> ToolMarks | None:
    """What `render` puts around tools; None if it puts no tools into a prompt.

    `headers`: the role headers of user and assistant.
    """
    chats = [[message("user", text)] for text in CONTENTS]
    chats += [[*chat, message("assistant", "three"), QUESTION] for chat in chats]
    chats += [[message("system", text), QUESTION] for text in CONTENTS]
    around = [_around_tools(render, chat, headers) for chat in chats]
    found = [(chat, texts) for chat, texts in zip(chats, around, strict=True) if texts is not None]
    if not found:
        return None
    chat = found[0][0]
    opening = tuple(common_end(*(before for _, (before, _) in found)).tolist())
    closing = tuple(common_start(*(behind for _, (_, behind) in found)).tolist())
    if not opening:
        return None
    # Its last token may be the beginning of a tool that the two tools happen to share.
    opening = opening[:-1] or opening
    marks = ToolMarks(opening, closing)
    rests = _rests(render, chat, marks, headers)
    if _are_equal(rests):
        return marks
    marks = ToolMarks(opening, closing, tuple(common_start(*rests[2:]).tolist()))
    if marks.more and _are_equal(_rests(render, chat, marks, headers)):
        return marks
    return ToolMarks(opening)


def _around_tools(
    render: Render, chat: list[Message], headers: Sequence[Part]
) -> tuple[Ints, Ints] | None:
    """The tokens of the template before the first and behind the last tool of `chat`, as far as
    they are in the same turn and not there without tools; None if there is no tool.
    """
    try:
        plain = rendered(render, chat)
        one, other = (rendered(render, chat, tools=[tool]) for tool in TOOLS)
    except Exception:  # templates refuse a chat with any exception
        return None
    first, last = num_common(one, other), num_common(one[::-1], other[::-1])
    if first == len(one) == len(other):
        return None
    before = one[min(first, num_common(one, plain)) : first]
    content = len(plain) - max(_contents_of(plain, headers), default=0)
    rest = min(last, content, num_common(one[::-1], plain[::-1]))
    behind = one[len(one) - last : len(one) - rest]
    before = before[max(_contents_of(before, headers), default=0) :]
    return before, behind[: min(turns_of(behind, headers), default=len(behind))]


def _rests(
    render: Render, chat: list[Message], marks: ToolMarks, headers: Sequence[Part]
) -> list[Ints]:
    """What follows the tools that `marks` find in `chat`: with one tool, with the other, and with
    both in either order.
    """
    rests = []
    for tools in (TOOLS[:1], TOOLS[1:], TOOLS, TOOLS[::-1]):
        ids = rendered(render, chat, tools=tools)
        spans = marks.find(ids, turns_of(ids, headers))
        rests.append(ids[spans[-1][1] if spans else 0 :])
    return rests


def _are_equal(parts: list[Ints]) -> bool:
    return all(np.array_equal(parts[0], part) for part in parts)
