"""The values of a trial's guards since its change.

1. a counter is its increase since the change; preemptions of pauses do not count
2. percentiles, goodput and the canary's means are of what happened since the change: tokens that
   came since, in the newest minute (`vtoken.core.runtime.latency` defines the window), requests of
   it with all their tokens since, and requests that ran under the revision on trial from their
   first step to their last
3. a rate is over the newest minute since the change, without the time of pauses
4. another gauge has a value once a step has run with the revision on trial
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from vtoken.control.limits import Limit
from vtoken.control.scheduling import Scheduling
from vtoken.wire import Guard, Status
from vtoken.wire.guards import Series, series_of

Clock = Callable[[], float]
ReadStatus = Callable[[], Status]

RATE_WINDOW_S = 60.0
SAMPLE_S = 1.0


class Rate:
    """The increase a second of a counter over the newest `RATE_WINDOW_S`; times are seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # time, value; at least SAMPLE_S apart

    def over(self, now: float, value: float) -> tuple[float | None, int]:
        """The rate with the counter at `value` now, and the seconds that it is over."""
        samples = self._samples
        if not samples or now - samples[-1][0] >= SAMPLE_S:
            samples.append((now, value))
        while len(samples) > 1 and now - samples[1][0] >= RATE_WINDOW_S:
            samples.popleft()
        since, before = samples[0]
        seconds = now - since
        return ((value - before) / seconds if seconds > 0 else None), int(seconds)


class GuardWatch:
    """Reads the guards of one trial; `close` it at the trial's end. `scheduling` has the runtime
    that the trial is on, and `status` reads its status.
    """

    def __init__(
        self,
        guards: Sequence[Guard],
        revision: int,
        scheduling: Scheduling,
        status: ReadStatus,
        clock: Clock,
    ) -> None:
        self._guards = [(guard, series_of(guard.metric)) for guard in guards]
        self._revision = revision
        self._scheduling = scheduling
        self._runtime = scheduling.runtime
        self._read_status = status
        self._clock = clock
        self._latencies = self._runtime.latency.watch(clock())
        self._counted: dict[Series, float] = {}  # a counter's first value
        self._rates: dict[Series, Rate] = {}
        self.limits()

    def close(self) -> None:
        self._runtime.latency.unwatch(self._latencies)

    def limits(self) -> list[Limit]:
        """Every guard with its value now."""
        status = self._status()
        return [self._limit(guard, series, status) for guard, series in self._guards]

    def _status(self) -> Status:
        """The status, with what happened since the change where that differs."""
        status = self._read_status()
        now = self._clock()
        status.latency = self._latencies.document(now)
        status.slo = self._latencies.slo(now, self._runtime.config.objectives)
        status.requests.preempted = self._scheduling.num_preemptions
        status.canary = self._runtime.canary.document(self._revision)
        return status

    def _limit(self, guard: Guard, series: Series, status: Status) -> Limit:
        value, count = series.read(status), None
        if series.is_rate:
            if value is not None:
                now = self._scheduling.running_s(self._clock())
                value, count = self._rates.setdefault(series, Rate()).over(now, value)
        elif series.is_counter:
            if value is not None:
                value -= self._counted.setdefault(series, value)
        elif series.samples:
            return limit_now(guard, series, status)
        elif self._runtime.effective[1] != self._revision:
            value = None
        return Limit(guard, series, value, count)


def limit_now(guard: Guard, series: Series, status: Status) -> Limit:
    """A guard on a gauge, with the value in `status`."""
    value, found = series.read(status), series.evidence(status)
    if found is None:
        return Limit(guard, series, value)
    return Limit(guard, series, value, found.num, found.error)
