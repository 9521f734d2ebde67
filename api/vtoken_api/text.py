"""Incremental detokenization: the vocabulary ids of a request to one piece of text a token.

It needs only `decode(ids, skip_special_tokens=False)`, which all tokenizers of vLLM have. As in
vLLM, the decoded window begins at a character boundary, and a piece is emitted once the window ends
at one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from vtoken import wire
from vtoken_api.problems import refuse

UNFINISHED = "\ufffd"  # decoders return it for an invalid or incomplete character
MAX_HELD_TOKENS = 8  # a character has at most four bytes, so a longer run is invalid


class RequestTexts:
    """Decodes pages with a lazily made copy of the server's tokenizer: a tokenizer may not encode
    and decode in two threads at once.
    """

    def __init__(self, get_tokenizer: Callable[[], Any]) -> None:
        self._get_tokenizer = get_tokenizer
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    def decode(self, source: wire.TextSource) -> wire.TextPage:
        """Fill in the texts of the page; thread-safe. Raises ProblemError 409 if the server has no
        tokenizer."""
        with self._lock:
            texts = pieces(self._decoder(), source.words)
        rows = source.page.rows
        for row, text in zip(rows, texts[len(texts) - len(rows) :], strict=True):
            row.text = text
        return source.page

    def _decoder(self) -> Any:
        if self._tokenizer is None:
            try:
                self._tokenizer = copy.deepcopy(self._get_tokenizer())
            except ValueError as error:  # started with --skip-tokenizer-init
                raise refuse(409, f"no text is available: {error}", title="No text") from error
        return self._tokenizer


def pieces(tokenizer: Any, words: Sequence[int]) -> list[str | None]:
    """The text that each of `words` [n] appends; concatenated, the pieces are the text.

    A character of several tokens is in the last one's piece. The piece of NO_TOKEN_ID is None.
    """
    found: list[str | None] = []
    begin = done = 0  # the window begins at `begin`; the text of words[begin:done] is emitted
    emitted = ""
    for i, word in enumerate(words):
        if word == wire.NO_TOKEN_ID:
            found.append(None)
            begin = done = i + 1
            emitted = ""
            continue
        text = tokenizer.decode(words[begin : i + 1], skip_special_tokens=False)
        held = text.endswith(UNFINISHED) and i - done < MAX_HELD_TOKENS
        if held or len(text) <= len(emitted):
            found.append("")
            continue
        found.append(text[len(emitted) :])
        begin, done = done, i + 1
        emitted = tokenizer.decode(words[begin:done], skip_special_tokens=False)
    return found
