"""Ends a streaming-input session for its client.

Other requests end by themselves: they are bounded, and give blocks or are preempted until then.
A session keeps its blocks between two turns for as long as its client likes.
"""

from __future__ import annotations

from collections.abc import Callable

from vtoken.base.errors import RefusedError
from vtoken.base.request_ids import short_id
from vtoken.core.runtime.runtime import Runtime
from vtoken.sentences import counted
from vtoken.wire import Ended

EndRequest = Callable[[str], object]


def end(runtime: Runtime, request_id: str, actor: str, end_request: EndRequest) -> Ended:
    """End the session `request_id`; raises RefusedError if it is another request.

    The event tells the API process that serves the client.
    """
    if not runtime.requests.own_rules(request_id).session:
        raise RefusedError(
            f"{request_id} is no streaming-input session: it ends by itself",
            field="request_id",
            value=request_id,
            bound="a session, see `session` in GET /vtoken/v1/requests",
            status=409,
            title="Not a session",
        )
    free = runtime.store.num_free_blocks()
    end_request(request_id)
    freed = runtime.store.num_free_blocks() - free
    runtime.events.add(
        runtime.step,
        "server",
        f"{actor} ended session {short_id(request_id)}, which frees {counted(freed, 'block')}",
        {"detail": "ended", "request_id": request_id, "freed_blocks": freed},
    )
    return Ended(request_id=request_id, freed_blocks=freed, revision=runtime.revision)
