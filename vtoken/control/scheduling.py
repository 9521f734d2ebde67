"""Whether the engine schedules requests, and what is not measured while it is paused.

`/pause` and `/sleep` stop vLLM's scheduling: for all requests (`paused`), or for requests that hold
no blocks yet (`paused_new`). A paused engine is neither slow nor short of blocks:
1. a pause counts neither as inter-token time nor as time to first token
2. preemptions while `paused`, which vLLM makes to empty the caches, do not count for a guard
"""

from __future__ import annotations

import time

from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import SchedulingState


class Scheduling:
    """The scheduling state of one engine."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.state: SchedulingState = "running"
        self.since_ts: float | None = None  # Unix seconds; None while running
        self._since = 0.0  # monotonic seconds
        self._preemptions_at_change = 0
        self._pause_preemptions = 0  # in pauses that have ended
        self._paused_s = 0.0  # in pauses that have ended

    def changed(self, state: SchedulingState, now: float) -> None:
        """The engine has entered `state` at `now`, in monotonic seconds."""
        before, runtime = self.state, self.runtime
        if state == before:
            return
        paused_s = now - self._since
        if before == "paused":
            self._paused_s += paused_s
        if before != "running":
            runtime.latency.leave_out(self._since, now, running=before == "paused")
        self._pause_preemptions = runtime.counters.requests.preempted - self.num_preemptions
        self._preemptions_at_change = runtime.counters.requests.preempted
        self.state, self._since = state, now
        self.since_ts = None if state == "running" else time.time()
        if state == "running":
            summary = f"scheduling resumed after {paused_s:.1f} s"
        elif state == "paused":
            summary = "scheduling paused: no request runs until it is resumed"
        else:
            summary = "scheduling paused: no new request starts until it is resumed"
        detail = "resumed" if state == "running" else "paused"
        data = {"detail": detail, "scheduling": state}
        runtime.events.add(runtime.step + 1, "server", summary, data)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far, without those of pauses."""
        paused = self.state == "paused"
        counted = (
            self._preemptions_at_change if paused else self.runtime.counters.requests.preempted
        )
        return counted - self._pause_preemptions

    def running_s(self, now: float) -> float:
        """Monotonic seconds at `now`, less those in which the engine was paused."""
        return (self._since if self.state == "paused" else now) - self._paused_s
