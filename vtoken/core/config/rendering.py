"""The chat template as a function that renders a chat, and the small chats it is learned from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vtoken.base.arrays import Ints

Message = dict[str, Any]
Tool = dict[str, Any]

# Contents that differ in their first and last token. The last one begins with white space, which a
# tokenizer may merge with white space of the template.
CONTENTS = ("alpha", "7 omega.", "\n\nbeta")
# Tools that differ in their first and last key, and in whether they have parameters: their texts
# have little in common besides what the template writes around them.
TOOLS: tuple[Tool, Tool] = (
    {
        "type": "function",
        "function": {
            "name": "alpha",
            "description": "One two.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "Three."}},
                "required": ["x"],
            },
        },
    },
    {
        "function": {
            "parameters": {"properties": {}, "type": "object"},
            "description": "7 of them",
            "name": "omega",
        },
        "type": "function",
    },
)
# A call of the first tool, and its result without the content. Some templates want such ids.
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "alpha", "arguments": {"x": "four"}},
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "abcdef123", "name": "alpha"}


class Render(Protocol):
    """Renders a chat as token ids; may raise anything for a chat that the template refuses."""

    def __call__(
        self, messages: list[Message], is_prompt: bool, tools: Sequence[Tool], /
    ) -> Sequence[int]:
        """`is_prompt`: with the role header of the answer."""


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def rendered(
    render: Render, chat: list[Message], *, is_prompt: bool = False, tools: Sequence[Tool] = ()
) -> Ints:
    """The token ids of `chat` [n]."""
    return np.asarray(render(chat, is_prompt, tools), dtype=np.int64)
