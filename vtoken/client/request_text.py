"""The text of one request, kept up to date with few calls.

Knows the calls, no sockets. Text never changes, and what became of a token only when something died
or the configuration changed: unless that is so, only the new tokens are asked for.
"""

from __future__ import annotations

from vtoken import wire
from vtoken.client import calls
from vtoken.client.sequences import Pages, Steps

PAGE_TOKENS = 2048


class RequestText:
    """`tokens`: every token whose text is known; their scores are those of when they were read.

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
        """Read what may have changed. `num_dead`: dead tokens of the request, `revision`: of the
        configuration, both read before the first call. Changes nothing before its end.
        """
        is_current = self._read_at == (num_dead, revision)
        tokens = list(self.tokens) if is_current else []
        while True:
            page = yield calls.text(self.request_id, len(tokens), PAGE_TOKENS)
            if page.total < len(tokens):  # it was preempted, and begins anew
                tokens = []
                continue
            tokens += page.rows
            if not page.rows or len(tokens) >= page.total:
                break
        self._read_at = num_dead, revision
        self.tokens, self.shadow = tokens, page.shadow
        self.num_prompt, self.step = page.prompt_tokens, page.step

    def page(self) -> wire.TextPage:
        """All of it as one document."""
        return wire.TextPage(
            request_id=self.request_id,
            step=self.step,
            start=0,
            total=len(self.tokens),
            rows=self.tokens,
            prompt_tokens=self.num_prompt,
            shadow=self.shadow,
        )


def refresh_text(text: RequestText, num_dead: int, revision: int) -> Steps[None]:
    """Read what has changed of a request's text: its new tokens, or all of it when `num_dead` (dead
    tokens of the request) or `revision` (of the configuration) differ from those of the last call.
    """
    return text.refresh(num_dead, revision)
