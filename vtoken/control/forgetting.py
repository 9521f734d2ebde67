"""Spans that a client names while its request waits or runs: their tokens die before all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.base.request_ids import short_id
from vtoken.core.config.spans import (
    check_apart,
    check_inside,
    covered,
    merged,
    num_tokens,
    pairs_of,
    read_spans,
)
from vtoken.core.config.token_sequences import Spans
from vtoken.core.runtime.runtime import Runtime
from vtoken.sentences import counted
from vtoken.wire import Forgotten

FIELD = "spans"


def forget(
    runtime: Runtime, name: str, asked: Sequence[tuple[int, int]], num_known: int, actor: str
) -> Forgotten:
    """Forget the spans that are `asked` for, of a request with `num_known` tokens. Idempotent.

    Raises RefusedError if a span leaves the request or overlaps a protected one.
    """
    requests = runtime.requests
    spans = read_spans([[*span] for span in asked], FIELD)
    check_inside(spans, num_known, FIELD, "request")
    check_apart(spans, tuple(requests.protection(name).spans()), FIELD)
    before = requests.forgotten.get(name, ())
    after = merged(before, spans)
    num_new = num_tokens(after) - num_tokens(merged(before, ()))
    if num_new:
        requests.forget_tokens(name, spans)
        policy = requests.rules(name).policy.name
        runtime.events.add(
            runtime.step,
            "eviction",
            f"{actor} lets {counted(num_new, 'token')} of {short_id(name)} die first",
            {
                "requests": 1,
                "tokens": 0,
                "given": 0,
                "policy": policy,
                "request_id": name,
                "forgotten": num_new,
            },
        )
    return Forgotten(
        request_id=name,
        spans=[*after],
        new_tokens=num_new,
        live_tokens=_num_live(runtime, name, after),
        revision=runtime.revision,
        notes=_notes(runtime, name),
    )


def _num_live(runtime: Runtime, request_id: str, spans: Spans) -> int:
    table = runtime.tables.get(request_id)
    return 0 if table is None else int(np.count_nonzero(covered(pairs_of(spans), table.live_ids())))


def _notes(runtime: Runtime, request_id: str) -> list[str]:
    policy = runtime.requests.rules(request_id).policy
    if policy.name == "none":
        return ["policy none evicts nothing: the tokens stay until the request has another policy"]
    if runtime.ranking.is_suspended(policy):
        return [f"policy {policy.name} has failed and evicts nothing: the tokens stay"]
    return []
