"""A request's tokens as text: which are live, protected and scored, and what the shadow would keep.

Reads the runtime and changes nothing. Text leaves the engine as vocabulary ids; the API process
decodes them, so that the engine's thread does not.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Floats
from vtoken.base.errors import RefusedError
from vtoken.core.config.spans import covered
from vtoken.core.runtime.requests import ShadowComparison
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_table import TokenTable
from vtoken.policies import params_dict
from vtoken.wire import (
    TEXT_CONTEXT_TOKENS,
    PolicyChoice,
    TextPage,
    TextShadow,
    TextSource,
    TextToken,
)


def text_source(runtime: Runtime, request_id: str, start: int, limit: int) -> TextSource:
    """The tokens `start` .. `start + limit` of a request that holds blocks, dead ones included.

    Raises RefusedError for an unknown request, and if the engine has no tokenizer.
    """
    table = runtime.tables[request_id]
    vocabulary = runtime.policy_runner.vocabulary
    if vocabulary is None:
        raise RefusedError(
            "this engine has no tokenizer, so requests have no text", status=409, title="No text"
        )
    words = vocabulary.known_words(request_id, 0, table.num_tokens)
    end = min(len(words), start + limit)
    compared = _comparison(runtime, table)
    page = TextPage(
        request_id=request_id,
        step=runtime.step,
        start=start,
        total=len(words),
        prompt_tokens=runtime.state.requests[request_id].num_prompt_tokens,
        rows=_rows(runtime, table, range(start, end), compared),
        shadow=None if compared is None else _shadow(compared),
    )
    context = words[max(0, start - TEXT_CONTEXT_TOKENS) : end] if page.rows else words[:0]
    return TextSource(page=page, words=context.tolist())


def score_of(scores: Floats | None, token_id: int) -> float | None:
    """A token's score among its request's `scores`; None where there is none yet."""
    return float(scores[token_id]) if scores is not None and token_id < len(scores) else None


def _rows(
    runtime: Runtime, table: TokenTable, ids: range, compared: ShadowComparison | None
) -> list[TextToken]:
    scores = runtime.scoring.newest(table.request_id)
    numbers = np.array(ids, dtype=np.int64)
    protected = runtime.state.protection(table.request_id).covers(numbers)
    forgotten = covered(runtime.state.forgotten_pairs(table.request_id), numbers) & ~protected
    victims: set[int] = set() if compared is None else set(compared.victims.tolist())
    chosen: set[int] = set() if compared is None else set(compared.chosen.tolist())
    num_compared = 0 if compared is None else compared.num_tokens
    rows = []
    for token_id, is_protected, is_forgotten in zip(
        ids, protected.tolist(), forgotten.tolist(), strict=True
    ):
        live = table.is_live(token_id)
        was_live = token_id < num_compared and (live or token_id in victims)
        rows.append(
            TextToken(
                token_id=token_id,
                position=token_id,
                text=None,
                live=live,
                protected=is_protected,
                score=score_of(scores, token_id),
                shadow_live=token_id not in chosen if was_live else None,
                forgotten=is_forgotten,
            )
        )
    return rows


def _comparison(runtime: Runtime, table: TokenTable) -> ShadowComparison | None:
    """The shadow's choice at the request's newest eviction; None if it made none then."""
    compared = runtime.state.requests[table.request_id].compared
    if compared is None or compared.policy is not runtime.state.shadow.active_policy:
        return None
    return compared if compared.num_dead == table.num_dead else None


def _shadow(compared: ShadowComparison) -> TextShadow:
    policy, chosen = compared.policy, set(compared.chosen.tolist())
    return TextShadow(
        policy=PolicyChoice(name=policy.name, params=params_dict(policy)),
        step=compared.step,
        num_tokens=compared.num_tokens,
        evicted=len(chosen),
        agreed=len(chosen.intersection(compared.victims.tolist())),
    )
