"""The conversations of the demo's clients: short chats, and questions about long passages.

The passages are prose that comes with Python (`pydoc_data.topics`, docstrings of the standard
library); nothing is downloaded.

1. Equal random states give equal conversations.
2. A passage has complete paragraphs and at most the requested length.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

SYSTEM_PROMPTS = (  # few, so that conversations share prefixes
    "You are a helpful AI assistant. Answer questions correctly, in plain words, and in a few "
    "sentences.",
    "You are a technical writer. Be precise and brief.",
)
CHATS = (
    ("What is the capital of France?", "What is that city famous for?"),
    ("Why is the sky blue?", "Explain it to a child in two sentences."),
    ("Give me three tips for learning to program.", "Which of the three matters most?"),
    ("What is photosynthesis?", "What would happen to animals without it?"),
    ("Write a short poem about the sea.", "Now write one about the mountains."),
    ("What should I cook with rice, eggs and tomatoes?", "What can I drink with it?"),
    ("How does a bicycle stay upright?", "What should a beginner practise first?"),
    ("What is the difference between a list and a tuple in Python?", "Show me an example."),
    ("Who was Isaac Newton?", "What did he find out about gravity?"),
    ("How can I sleep better?", "Make me a short plan for the evening."),
)
PASSAGE_QUESTIONS = (
    "Summarise the text in two sentences.",
    "What is the most important rule in this text?",
    "Explain this text to a beginner in three sentences.",
    "Which example does the text give, and what does it show?",
    "What may go wrong, according to this text?",
    "Which words does the text define? Name a few.",
)
MODULES = """
    argparse bisect calendar cmd collections csv datetime decimal difflib doctest fractions
    functools heapq imaplib inspect json logging optparse pdb pickle pprint random sched
    statistics string subprocess textwrap threading timeit typing urllib.request
"""
CHAT_SHARE = 0.5  # of the conversations
MIN_PASSAGE_CHARS = 1500
LONG_TOKENS = 400, 500  # of an answer that outlives a busy phase


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's side. Each of `questions` is sent after the answer to the one before.

    `passage`: the text of the questions, sent before the first one; empty for a chat.
    """

    system: str
    questions: Sequence[str]
    max_tokens: int  # of one answer
    passage: str = ""
    min_tokens: int = 0

    @property
    def kind(self) -> str:
        return "passage" if self.passage else "chat"


def make_conversation(
    rng: random.Random, max_passage_chars: int, *, is_long: bool = False
) -> Conversation:
    """A chat, or questions about a passage of at most `max_passage_chars` characters. `is_long`: it
    is about a passage, and its answers take `LONG_TOKENS`.
    """
    system = rng.choice(SYSTEM_PROMPTS)
    chat = not is_long and rng.random() < CHAT_SHARE
    if chat or max_passage_chars < MIN_PASSAGE_CHARS:
        return Conversation(system, rng.choice(CHATS), rng.randint(48, 128))
    text = rng.choice(passages())
    num_chars = rng.randint(MIN_PASSAGE_CHARS, max_passage_chars)
    questions = rng.sample(PASSAGE_QUESTIONS, 2)
    least, most = LONG_TOKENS if is_long else (0, rng.randint(64, 160))
    return Conversation(system, questions, most, excerpt(text, num_chars), least)


@cache
def passages() -> list[str]:
    """All passages of at least MIN_PASSAGE_CHARS, in a fixed order."""
    from pydoc_data.topics import topics

    found = [topics[name].strip() for name in sorted(topics)]
    found += [inspect.getdoc(import_module(name)) or "" for name in MODULES.split()]
    return [text for text in found if len(text) >= MIN_PASSAGE_CHARS]


def excerpt(text: str, num_chars: int) -> str:
    """The first paragraphs of `text`, or its first characters if the first paragraph is longer."""
    if len(text) <= num_chars:
        return text
    end = text.rfind("\n\n", 0, num_chars)
    return text[: end if end > 0 else num_chars].rstrip()
