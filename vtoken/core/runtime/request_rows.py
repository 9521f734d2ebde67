"""The wire's row of a request, wherever it is in its life: one place fills what all rows share."""

from __future__ import annotations

from typing import TypeVar

from vtoken.core.runtime.requests import Requests
from vtoken.wire import RequestDetail, RequestRow, RequestState

R = TypeVar("R", bound=RequestRow)


def request_row(
    make: type[R],
    requests: Requests,
    request_id: str,
    state: RequestState,
    *,
    prompt_tokens: int,
    output_tokens: int,
) -> R:
    """The row of a request without blocks and tokens; the caller adds those that it has."""
    rules = requests.rules(request_id)
    return make(
        id=request_id,
        state=state,
        live=0,
        dead=0,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=0,
        bound_blocks=0,
        naive_blocks=0,
        policy=rules.policy.name,
        budget_tokens=rules.budget_tokens,
        dense=True,
        preemptions=requests.num_preemptions(request_id),
        evict_when=rules.evict_when,
        session=requests.own_rules(request_id).session,
    )


def describe_rules(requests: Requests, detail: RequestDetail) -> None:
    """Fill in when a request evicts, which of its tokens are protected and forgotten, and a budget
    of its own that its policy and its protected tokens exceed.
    """
    protection = requests.protection(detail.id)
    detail.evict_during = requests.rules(detail.id).evict_during
    detail.protected, detail.protection_cut = protection.spans(), list(protection.cut)
    detail.forgotten = [*requests.forgotten.get(detail.id, ())]
    asked = requests.own_rules(detail.id).budget_tokens
    if asked is not None and asked < detail.budget_tokens:
        detail.asked_budget_tokens = asked
