"""The quality canary's part of the scheduler: `Checks` hears of each request and each step.

Stands before `VTokenSchedulerMixin` in the bases, which knows nothing of the canary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from vtoken.core.runtime.growth import Scheduled
from vtoken.vllm.engine.canary.checks import Checks


class CanarySchedulerMixin(Scheduler):
    """Samples finished requests, and runs one check of them at a time beside the requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vtoken_canary = Checks(self, self.vtoken)

    # ------------------------------------------------------------ the step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.vtoken_canary.before_step()
        output = super().schedule(throttle_prefills)
        self.vtoken_canary.after_step()
        return output

    def _may_be_due(self) -> list[Any]:
        """Without a check: no request gives a token or moves for it."""
        check = self.vtoken_canary.request
        return [request for request in super()._may_be_due() if request is not check]

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        if request is self.vtoken_canary.request:
            num_new_tokens = self.vtoken_canary.limit(num_new_tokens)
        num_tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return num_tokens

    def _scheduled(self, num_scheduled: Mapping[str, int]) -> Scheduled:
        scheduled: Scheduled = super()._scheduled(num_scheduled)
        self.vtoken_canary.samples.started(scheduled.new)
        return scheduled

    def _note_outputs(self, outputs: dict[int, Any]) -> None:
        self.vtoken_canary.take_outputs(outputs)
        super()._note_outputs(outputs)

    # ------------------------------------------------------------ a request's arrival and end

    def _announce(self, request: Any) -> None:
        if request is not self.vtoken_canary.request:
            super()._announce(request)
            self.vtoken_canary.samples.arrived(request)

    def _free_blocks(self, request: Any) -> None:
        self.vtoken_canary.samples.ended(request)
        super()._free_blocks(request)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.vtoken_canary.samples.preempted(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if request_ids is not None:
            return super().finish_requests(request_ids, *args, **kwargs)
        self.vtoken_canary.drop_all()  # before: a check is none of the requests that vLLM returns
        ended = super().finish_requests(None, *args, **kwargs)
        self.vtoken_canary.drop_all()  # after: none of them is checked
        return ended

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests or not self.vtoken_canary.others_hold_blocks():
            self.vtoken_canary.drop_all()  # the weights may be others from now on
        reset: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        return reset

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state != PauseState.UNPAUSED:
            self.vtoken_canary.drop_all()
        super().set_pause_state(pause_state)

    def vtoken_weights_changed(self, call: str, num_dropped: int = 0) -> None:
        num_dropped += self.vtoken_canary.weights_changed()
        super().vtoken_weights_changed(call, num_dropped)

    # ------------------------------------------------------------ what vLLM counts

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        checks_running, checks_waiting = self.vtoken_canary.num_counted
        return running - checks_running, waiting - checks_waiting

    def get_num_unfinished_requests(self) -> int:
        """With checks: the engine keeps stepping until they end."""
        unfinished = super().get_num_unfinished_requests()
        return int(unfinished + self.vtoken_canary.num_unfinished)
