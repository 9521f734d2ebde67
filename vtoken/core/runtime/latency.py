"""Engine-side latency: recent percentiles of time to first token and between tokens.

Independent of vLLM. Input: arrivals, the requests that each step gave a token, and monotonic time.
A preempted request's gap counts, because its user waits; an output of several tokens counts as one
gap, as in vLLM's own metrics.

Histograms have buckets whose bounds grow by 2^(1/16) and report a bucket's middle, so a percentile
(nearest rank) is off by at most 2.2% between 0.01 ms and 2.9 hours; values beyond are reported as
that bound. Counts are stored in `NUM_SPANS` spans of `SPAN_S`, of which the oldest is dropped as a
unit, so the window covers the last 55 to 60 seconds. Memory is constant.
"""

from __future__ import annotations

from math import log2

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints
from vtoken.wire import Latency, Percentiles

SPAN_S = 5.0
NUM_SPANS = 12
LEAST_MS = 0.01
BUCKETS_A_DOUBLING = 16
NUM_BUCKETS = 30 * BUCKETS_A_DOUBLING


class Histogram:
    """Counts of durations over the newest spans; spans are numbered by time.

    `_window` is the sum of `_counts` over the spans in the window, maintained incrementally.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((NUM_SPANS, NUM_BUCKETS), dtype=np.int64)
        self._spans = np.full(NUM_SPANS, -NUM_SPANS, dtype=np.int64)  # the span in each row
        self._window = np.zeros(NUM_BUCKETS, dtype=np.int64)
        self._newest = -NUM_SPANS

    def _advance(self, span: int) -> Ints:
        """Drop spans outside the window that ends with `span`; its counts [NUM_BUCKETS]."""
        row = span % NUM_SPANS
        if span > self._newest:
            over = self._spans <= span - NUM_SPANS
            self._window -= self._counts[over].sum(axis=0)
            self._counts[over] = 0
            self._spans[row] = self._newest = span
        counts: Ints = self._counts[row]
        return counts

    def add(self, span: int, ms: float, count: int = 1) -> None:
        """Add `count` durations of `ms`."""
        bucket = int(log2(ms / LEAST_MS) * BUCKETS_A_DOUBLING) if ms > LEAST_MS else 0
        bucket = min(bucket, NUM_BUCKETS - 1)
        self._advance(span)[bucket] += count
        self._window[bucket] += count

    def add_all(self, span: int, ms: npt.NDArray[np.float64]) -> None:
        """Add the durations `ms` [n]."""
        doublings = np.log2(np.maximum(ms / LEAST_MS, 1.0))
        buckets = np.minimum((doublings * BUCKETS_A_DOUBLING).astype(np.int64), NUM_BUCKETS - 1)
        np.add.at(self._advance(span), buckets, 1)
        np.add.at(self._window, buckets, 1)

    def percentiles(self, span: int) -> Percentiles:
        """Percentiles of the window that ends with `span`."""
        self._advance(span)
        below = np.cumsum(self._window)
        count = int(below[-1])
        if count == 0:
            return Percentiles(count=0)
        ranks = [-(-percent * count // 100) for percent in (50, 95, 99)]
        p50, p95, p99 = (
            LEAST_MS * 2 ** ((bucket + 0.5) / BUCKETS_A_DOUBLING)
            for bucket in np.searchsorted(below, ranks).tolist()
        )
        return Percentiles(count=count, p50_ms=p50, p95_ms=p95, p99_ms=p99)


class Latencies:
    """Times to first token and times between tokens, over the newest spans."""

    def __init__(self) -> None:
        self.first = Histogram()
        self.between = Histogram()

    def document(self, now: float) -> Latency:
        """Percentiles of the window that ends at `now`, in monotonic seconds."""
        span = int(now / SPAN_S)
        return Latency(
            window_s=SPAN_S * NUM_SPANS,
            ttft=self.first.percentiles(span),
            inter_token=self.between.percentiles(span),
        )


class LatencyMeter:
    """Measures every request from its arrival to its last token; times are monotonic seconds.

    Requests that got a token in the same step wait equally long for the next one. As long as a step
    serves exactly the requests of the previous step, the *cohort*, one gap is counted for all of
    them. Otherwise each request is looked up.
    """

    def __init__(self) -> None:
        self._latencies = Latencies()
        self._watched: list[Latencies] = []
        self._arrived: dict[str, float] = {}  # before their first token
        self._last: dict[str, float] = {}  # newest token of requests outside the cohort
        self._cohort: list[str] = []
        self._cohort_time = 0.0
        self._finished: set[str] = set()

    def arrived(self, request_id: str, now: float) -> None:
        """The request, or its next turn, starts waiting for its first token."""
        self._finished.discard(request_id)
        self._last.pop(request_id, None)
        if request_id in self._cohort:
            self._cohort.remove(request_id)
        self._arrived[request_id] = now

    def discard(self, request_id: str) -> None:
        """The request has finished; the current step may still report a token for it."""
        self._finished.add(request_id)

    def tokens(self, request_ids: list[str], now: float) -> None:
        """A step gave a token to each of `request_ids`; the list is stored, not copied."""
        if request_ids:
            span = int(now / SPAN_S)
            if request_ids == self._cohort:
                ms = (now - self._cohort_time) * 1e3
                for latencies in (self._latencies, *self._watched):
                    latencies.between.add(span, ms, len(request_ids))
            else:
                self._record_each(request_ids, span, now)
            self._cohort_time = now
        if self._finished:
            self._purge()

    def leave_out(self, since: float, now: float, *, running: bool) -> None:
        """Exclude a pause from `since` to `now` from all gaps.

        `running`: of all requests, else only of those that the newest step did not serve.
        """

        def shifted(moment: float) -> float:
            return moment + now - max(moment, since)

        self._arrived = {key: shifted(moment) for key, moment in self._arrived.items()}
        self._last = {key: shifted(moment) for key, moment in self._last.items()}
        if running:
            self._cohort_time = shifted(self._cohort_time)

    def _record_each(self, request_ids: list[str], span: int, now: float) -> None:
        last, arrived = self._last, self._arrived
        last.update(dict.fromkeys(self._cohort, self._cohort_time))
        since = np.array([last.pop(key, np.nan) for key in request_ids])
        known = ~np.isnan(since)
        if known.any():
            for latencies in (self._latencies, *self._watched):
                latencies.between.add_all(span, (now - since[known]) * 1e3)
        if not known.all():
            for index in np.flatnonzero(~known).tolist():
                started = arrived.pop(request_ids[index], None)
                if started is not None:
                    for latencies in (self._latencies, *self._watched):
                        latencies.first.add(span, (now - started) * 1e3)
        self._cohort = request_ids

    def _purge(self) -> None:
        finished = self._finished
        if not finished.isdisjoint(self._cohort):
            self._cohort = [key for key in self._cohort if key not in finished]
        for key in finished:
            self._last.pop(key, None)
            self._arrived.pop(key, None)
        finished.clear()

    def watch(self) -> Latencies:
        """The times that end from now on, until `unwatch`."""
        self._watched.append(Latencies())
        return self._watched[-1]

    def unwatch(self, latencies: Latencies) -> None:
        self._watched.remove(latencies)

    def document(self, now: float) -> Latency:
        return self._latencies.document(now)
