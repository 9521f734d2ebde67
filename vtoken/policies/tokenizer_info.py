"""What a policy may know of the words behind the tokens; the engine implements it.

Knows no tokenizer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vtoken.tables.token_table import Ids, Mask


class Vocabulary(Protocol):
    """The words of the requests, and the two kinds of word that policies tell apart."""

    def refusal(self) -> str | None:
        """Why there is no vocabulary; None when there is one. The first call may load it."""

    def words(self, request_id: str, ids: Ids) -> npt.NDArray[np.int64]:
        """The vocabulary ids [n] of the tokens `ids` [n] of a request."""

    def special(self, words: npt.NDArray[np.int64]) -> Mask:
        """Which of `words` [n] are special tokens (begin, end, roles) and no text."""

    def punctuation(self, words: npt.NDArray[np.int64]) -> Mask:
        """Which of `words` [n] are punctuation and nothing else."""
