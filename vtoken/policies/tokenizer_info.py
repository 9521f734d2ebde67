"""What a policy may know of the words behind the tokens; the engine implements it.

Knows no tokenizer.
"""

from __future__ import annotations

from typing import Protocol

from vtoken.arrays import Bools, Ints


class Vocabulary(Protocol):
    """The words of the requests, and the two kinds of word that policies tell apart."""

    def refusal(self) -> str | None:
        """Why there is no vocabulary; None when there is one. The first call may load it."""

    def words(self, request_id: str, ids: Ints) -> Ints:
        """The vocabulary ids [n] of the tokens `ids` [n] of a request."""

    def known_words(self, request_id: str, start: int, stop: int) -> Ints:
        """The vocabulary ids of the tokens `start` .. `stop`, fewer where the newest are not
        sampled yet; NO_WORD for a place of a prompt that was given as embeddings.
        """

    def special(self, words: Ints) -> Bools:
        """Which of `words` [n] are special tokens (begin, end, roles) and no text."""

    def punctuation(self, words: Ints) -> Bools:
        """Which of `words` [n] are punctuation and nothing else."""
