"""The text of one request, kept up to date with few calls.

A token's text never changes. Its state changes only after an eviction or a change of the
configuration; without one, a refresh fetches only the new tokens.
"""

from __future__ import annotations

from vtoken import wire
from vtoken.client import calls
from vtoken.client.call import Pages, Steps

PAGE_TOKENS = 2048


class RequestText:
    """`tokens`: every token fetched; a token's score is as of its fetch.

    `refresh_text` of a client keeps it up to date.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens: list[wire.TextToken] = []
        self.shadow: wire.TextShadow | None = None
        self.num_prompt = 0
        self.step = 0
        self._read_at: tuple[int, int] | None = None

    def refresh(self, num_dead: int, revision: int) -> Pages[wire.TextPage]:
        """Fetch what may have changed. `num_dead` dead tokens of the request and the `revision` of
        the configuration must be read before the first call. `self` changes only at the end.
        """
        is_current = self._read_at == (num_dead, revision)
        tokens = list(self.tokens) if is_current else []
        while True:
            page = yield calls.text(self.request_id, len(tokens), PAGE_TOKENS)
            if page.total < len(tokens):  # the request was preempted and starts again
                tokens = []
                continue
            tokens += page.rows
            if not page.rows or len(tokens) >= page.total:
                break
        self._read_at = num_dead, revision
        self.tokens, self.shadow = tokens, page.shadow
        self.num_prompt, self.step = page.prompt_tokens, page.step


def refresh_text(text: RequestText, num_dead: int, revision: int) -> Steps[None]:
    """Update a request's text: fetch its new tokens, or all of them if `num_dead` (dead tokens of
    the request) or `revision` (of the configuration) differ from those of the last call.
    """
    return text.refresh(num_dead, revision)
