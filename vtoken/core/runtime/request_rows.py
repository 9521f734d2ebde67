"""The wire's row of a request, wherever it is in its life: one place fills what all rows share."""

from __future__ import annotations

from typing import Any, TypeVar

from vtoken.core.runtime.requests import Requests
from vtoken.wire import RequestDetail, RequestRow, RequestState

R = TypeVar("R", bound=RequestRow)
NO_BLOCKS: dict[str, Any] = {
    "live": 0,
    "dead": 0,
    "blocks": 0,
    "bound_blocks": 0,
    "naive_blocks": 0,
    "dense": True,
}


def request_row(
    make: type[R],
    requests: Requests,
    request_id: str,
    state: RequestState,
    *,
    prompt_tokens: int,
    output_tokens: int,
    **held: Any,
) -> R:
    """The row of a request, with what it holds, or held: nothing unless `held` says so."""
    rules = requests.rules(request_id)
    row = make(
        id=request_id,
        state=state,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        policy=rules.policy.name,
        budget_tokens=rules.budget_tokens,
        evict_when=rules.evict_when,
        **NO_BLOCKS | held,
    )
    announced = requests.announced.get(request_id)
    if announced is not None:
        row.preemptions, row.session = announced.num_preemptions, announced.rules.session
        row.arrived_ts, row.waited_s = announced.arrived_ts, announced.waited_s
    return row


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
