"""The tokens of a request that holds blocks, page by page: where each is, and as text.

Reads the runtime and changes nothing. Text leaves the engine as vocabulary ids; the API process
decodes them, so that the engine's thread does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vtoken.base.errors import RefusedError
from vtoken.core.config.spans import covered
from vtoken.core.runtime.held_request import ShadowComparison
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_table import TokenTable
from vtoken.wire import (
    TEXT_CONTEXT_TOKENS,
    TextPage,
    TextShadow,
    TextSource,
    TextToken,
    TokenPage,
    TokenRow,
)


class _Token(NamedTuple):
    """`score`: None where there is none yet; `slot`: -1 for a dead token without one."""

    id: int
    slot: int
    live: bool
    protected: bool
    forgotten: bool
    parked: bool
    score: float | None


def _tokens(runtime: Runtime, table: TokenTable, start: int, stop: int) -> Iterator[_Token]:
    """The tokens `start` .. `stop`, dead ones included."""
    name, requests = table.request_id, runtime.requests
    ids = np.arange(max(0, start), min(table.num_tokens, stop), dtype=np.int64)
    protected = requests.protection(name).covers(ids)
    forgotten = covered(requests.forgotten_pairs(name), ids) & ~protected
    scores = runtime.ranking.newest(name)
    columns = ids, table.slots_of(ids), protected, forgotten, table.hosts_of(ids) >= 0
    for token_id, slot, is_protected, is_forgotten, has_copy in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        score = None
        if scores is not None and token_id < len(scores) and np.isfinite(scores[token_id]):
            score = float(scores[token_id])
        live = table.is_live(token_id)
        parked = has_copy and not live
        yield _Token(token_id, slot, live, is_protected, is_forgotten, parked, score)


def token_page(runtime: Runtime, request_id: str, start: int, limit: int) -> TokenPage:
    """Rows of the tokens `start` .. `start + limit`; none of a queued request, which has no slot
    yet.
    """
    page = TokenPage(request_id=request_id, step=runtime.step, start=start, total=0, rows=[])
    table = runtime.tables.get(request_id)
    if table is None:
        return page
    page.total = table.num_tokens
    for token in _tokens(runtime, table, start, start + limit):
        block, offset = divmod(token.slot, table.block_size)
        page.rows.append(
            TokenRow(
                token_id=token.id,
                position=token.id,
                block=block if token.slot >= 0 else None,
                offset=offset if token.slot >= 0 else None,
                live=token.live,
                score=token.score,
                protected=token.protected,
                forgotten=token.forgotten,
                parked=token.parked,
            )
        )
    return page


def text_source(runtime: Runtime, request_id: str, start: int, limit: int) -> TextSource:
    """Vocabulary ids and states of the tokens `start` .. `start + limit`, dead ones included; none
    of a queued request.

    Raises RefusedError if the engine has no tokenizer.
    """
    page = TextPage(request_id=request_id, step=runtime.step, start=start, total=0, rows=[])
    table = runtime.tables.get(request_id)
    if table is None:
        return TextSource(page=page, words=[])
    vocabulary = runtime.ranking.vocabulary
    if vocabulary is None:
        raise RefusedError(
            "this engine has no tokenizer, so requests have no text", status=409, title="No text"
        )
    words = vocabulary.known_words(request_id, 0, table.num_tokens)
    end = min(len(words), start + limit)
    compared = _comparison(runtime, table)
    page.total = len(words)
    page.prompt_tokens = runtime.requests.held[request_id].num_prompt_tokens
    page.rows = _text_rows(runtime, table, start, end, compared)
    page.shadow = None if compared is None else _shadow(compared)
    context = words[max(0, start - TEXT_CONTEXT_TOKENS) : end] if page.rows else words[:0]
    return TextSource(page=page, words=context.tolist())


def _text_rows(
    runtime: Runtime, table: TokenTable, start: int, end: int, compared: ShadowComparison | None
) -> list[TextToken]:
    victims: set[int] = set() if compared is None else set(compared.victims.tolist())
    chosen: set[int] = set() if compared is None else set(compared.chosen.tolist())
    num_compared = 0 if compared is None else compared.num_tokens
    rows = []
    for token in _tokens(runtime, table, start, end):
        was_live = token.id < num_compared and (token.live or token.id in victims)
        rows.append(
            TextToken(
                token_id=token.id,
                position=token.id,
                text=None,
                live=token.live,
                protected=token.protected,
                score=token.score,
                shadow_live=token.id not in chosen if was_live else None,
                forgotten=token.forgotten,
                parked=token.parked,
            )
        )
    return rows


def _comparison(runtime: Runtime, table: TokenTable) -> ShadowComparison | None:
    """The shadow's choice at the request's newest eviction; None if it made none then, or if tokens
    came back since.
    """
    compared = runtime.requests.held[table.request_id].compared
    if compared is None or compared.policy is not runtime.shadow.active_policy:
        return None
    return compared if compared.live_changes == table.live_changes else None


def _shadow(compared: ShadowComparison) -> TextShadow:
    policy, chosen = compared.policy, set(compared.chosen.tolist())
    return TextShadow(
        policy=policy.choice,
        step=compared.step,
        num_tokens=compared.num_tokens,
        evicted=len(chosen),
        agreed=len(chosen.intersection(compared.victims.tolist())),
    )
