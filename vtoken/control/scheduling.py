"""Whether the engine schedules requests, and what is not measured while it does not.

vLLM stops scheduling when it is told to (`/pause`, `/sleep`): as a whole (`paused`), or for
requests that hold no blocks yet (`paused_new`). A paused engine is neither slow nor short of
blocks:
1. the time of a pause is no gap between two tokens and no time to a first one
2. preemptions during a whole pause, which are made to empty the caches, trip no guard
"""

from __future__ import annotations

import time

from vtoken.runtime.runtime import Runtime
from vtoken.wire import SchedulingState


class Scheduling:
    """Follows the scheduling of one engine."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.state: SchedulingState = "running"
        self.since_ts: float | None = None  # Unix seconds; None while it runs
        self._since = 0.0  # monotonic seconds
        self._preemptions_then = 0
        self._preemptions_of_pauses = 0  # of those that are over

    def changed(self, state: SchedulingState, now: float) -> None:
        """The engine schedules as `state` says from now on; `now`: monotonic seconds."""
        before, runtime = self.state, self._runtime
        if state == before:
            return
        paused_s = now - self._since
        if before != "running":
            runtime.latency.leave_out(self._since, now, running=before == "paused")
        self._preemptions_of_pauses = runtime.counters.preemptions - self.num_preemptions
        self._preemptions_then = runtime.counters.preemptions
        self.state, self._since = state, now
        self.since_ts = None if state == "running" else time.time()
        if state == "running":
            summary = f"scheduling resumed after {paused_s:.1f} s"
        elif state == "paused":
            summary = "scheduling paused: no request goes on until it is resumed"
        else:
            summary = "scheduling paused: no further request starts until it is resumed"
        detail = "resumed" if state == "running" else "paused"
        data = {"detail": detail, "scheduling": state}
        runtime.events.add(runtime.step + 1, "server", summary, data)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far that no pause has made."""
        paused = self.state == "paused"
        counted = self._preemptions_then if paused else self._runtime.counters.preemptions
        return counted - self._preemptions_of_pauses
