"""The vocabulary as policies see it; the engine implements it with the model's tokenizer."""

from __future__ import annotations

from typing import Protocol

from vtoken.base.arrays import Bools, Ints


class Vocabulary(Protocol):
    """Vocabulary ids of the requests' tokens, and the two kinds of token that policies use."""

    def refusal(self) -> str | None:
        """Why there is no vocabulary; None if there is one. The first call may load it."""

    def words(self, request_id: str, ids: Ints) -> Ints:
        """The vocabulary ids [n] of the tokens `ids` [n] of a request."""

    def known_words(self, request_id: str, start: int, stop: int) -> Ints:
        """The vocabulary ids of the tokens `start` .. `stop`, without those not sampled yet.

        NO_TOKEN_ID for a position of a prompt that was given as embeddings.
        """

    def special(self, words: Ints) -> Bools:
        """Which of `words` [n] are special tokens (begin, end, roles) rather than text."""

    def punctuation(self, words: Ints) -> Bools:
        """Which of `words` [n] are punctuation only."""
