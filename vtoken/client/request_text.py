"""The text of one request, kept up to date with few calls.

A token's text never changes. Its state changes only after an eviction or a restore, or after a
change of the configuration; without one, a refresh fetches only the new tokens.
"""

from __future__ import annotations

from vtoken import wire
from vtoken.client import calls
from vtoken.client.call import Steps

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
        self.read_at: tuple[int, ...] | None = None  # the arguments of the newest refresh


def refresh_text(
    text: RequestText,
    num_dead: int,
    revision: int,
    num_restored: int = 0,
    num_parked: int = 0,
) -> Steps[None]:
    """Update a request's text: fetch its new tokens, or all of them if its dead, restored or parked
    tokens, or `revision` (of the configuration), differ from those of the last call.

    They must be read before the first call. `text` changes only at the end.
    """
    read_at = num_dead, revision, num_restored, num_parked
    is_current = text.read_at == read_at
    tokens = list(text.tokens) if is_current else []
    while True:
        page: wire.TextPage = yield calls.text(text.request_id, len(tokens), PAGE_TOKENS)
        if page.total < len(tokens):  # the request was preempted and starts again
            tokens = []
            continue
        tokens += page.rows
        if not page.rows or len(tokens) >= page.total:
            break
    text.read_at = read_at
    text.tokens, text.shadow = tokens, page.shadow
    text.num_prompt, text.step = page.prompt_tokens, page.step
