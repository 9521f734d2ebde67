"""vLLM's waiting queues as `vtoken.control.waiting.WaitingQueue`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vtoken.control.waiting import QueuedRequest
from vtoken.wire import RequestState


class SchedulerQueue:
    """The requests of one scheduler that do not run, read from vLLM's queues at every call."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def first(self, limit: int) -> Iterable[QueuedRequest]:
        queues = chain(self._scheduler.kv_holding_waiting, self._scheduler.waiting)
        return map(_queued, islice(queues, limit))

    def find(self, request_id: str) -> QueuedRequest | None:
        request = self._scheduler.requests.get(request_id)
        waits = request is not None and request.status != RequestStatus.RUNNING
        return _queued(request) if waits and not request.is_finished() else None


def is_idle(request: Request) -> bool:
    """Whether the request is a session that waits for its client's next input."""
    return bool(request.status == RequestStatus.WAITING_FOR_STREAMING_REQ)


def _queued(request: Request) -> QueuedRequest:
    state: RequestState = "idle" if is_idle(request) else "waiting"
    if request.status == RequestStatus.PREEMPTED:
        state = "preempted"
    return QueuedRequest(
        request.request_id, request.num_prompt_tokens, request.num_output_tokens, state
    )
