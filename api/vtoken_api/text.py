"""From the words of a request to its text, a piece a token.

Knows a tokenizer by one method, `decode(ids, skip_special_tokens=False)`, which all of vLLM's have.
Decodes as vLLM does for its own answers: a window of tokens that begins at a whole character, and
a piece only once the window ends with one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vtoken import wire
from vtoken_api.problems import refuse

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no character, or none yet
MAX_HELD_TOKENS = 8  # a character has four bytes at most: more than these are none


class Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of vocabulary ids."""


class RequestTexts:
    """Decodes pages with a copy of the server's tokenizer, which is made when it is first needed:
    one tokenizer may not encode and decode at the same time in two threads.
    """

    def __init__(self, get_tokenizer: Callable[[], Any]) -> None:
        self._get_tokenizer = get_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._turn = threading.Lock()

    def decode(self, source: wire.TextSource) -> wire.TextPage:
        """The page with its texts; may be called in any thread. Raises ProblemError 409 where the
        server has no tokenizer."""
        with self._turn:
            texts = pieces(self._decoder(), source.words)
        rows = source.page.rows
        for row, text in zip(rows, texts[len(texts) - len(rows) :], strict=True):
            row.text = text
        return source.page

    def _decoder(self) -> Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = copy.deepcopy(self._get_tokenizer())
            except ValueError as error:  # started with --skip-tokenizer-init
                raise refuse(409, f"there is no text: {error}", title="No text") from error
        return self._tokenizer


def pieces(tokenizer: Tokenizer, words: Sequence[int]) -> list[str | None]:
    """What each of `words` [n] adds to their text; together they are the text.

    A character of several tokens is in the last one's piece. None where there is no word.
    """
    found: list[str | None] = []
    begin = done = 0  # the window begins at `begin`; the text of words[begin:done] has been given
    given = ""
    for i, word in enumerate(words):
        if word == wire.NO_WORD:
            found.append(None)
            begin = done = i + 1
            given = ""
            continue
        text = tokenizer.decode(words[begin : i + 1], skip_special_tokens=False)
        held = text.endswith(UNFINISHED) and i - done < MAX_HELD_TOKENS
        if held or len(text) <= len(given):
            found.append("")
            continue
        found.append(text[len(given) :])
        begin, done = done, i + 1
        given = tokenizer.decode(words[begin:done], skip_special_tokens=False)
    return found
