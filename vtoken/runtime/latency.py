"""Latency as the engine sees it: percentiles of time to first token and between tokens, lately.

Knows neither requests' contents nor vLLM: it is told when requests arrive, which of them were given
a token by a step, and the time, which must be monotonic. A preempted request's gap counts, since
its user waits; an output of several tokens counts as one gap, as in vLLM's own metrics.

Durations are counted in buckets whose bounds grow by 2^(1/16), and told as the middle of one, so a
percentile (nearest rank) is off by at most 2.2% of itself between 0.01 ms and 2.9 hours; what lies
beyond is told as that bound. Counts are kept in `NUM_SPANS` spans of `SPAN_S`, of which the oldest
falls out as a whole: the window reaches back between 55 and 60 seconds. Nothing grows with time.
"""

from __future__ import annotations

from math import log2

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Ints
from vtoken.wire import Latency, Percentiles

SPAN_S = 5.0
NUM_SPANS = 12
LEAST_MS = 0.01
BUCKETS_A_DOUBLING = 16
NUM_BUCKETS = 30 * BUCKETS_A_DOUBLING
MAX_RELATIVE_ERROR = 2 ** (0.5 / BUCKETS_A_DOUBLING) - 1


class Histogram:
    """Counts of durations over the newest spans; spans are numbered by time.

    `_window` = sum of `_counts` over the spans that are not over, kept incrementally. What `add` is
    told waits in `_fresh` until somebody asks, or its span is over: a step should not have to fetch
    arrays for one number.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((NUM_SPANS, NUM_BUCKETS), dtype=np.int64)
        self._spans = np.full(NUM_SPANS, -NUM_SPANS, dtype=np.int64)  # which one stands in a row
        self._window = np.zeros(NUM_BUCKETS, dtype=np.int64)
        self._newest = -NUM_SPANS
        self._fresh: dict[int, int] = {}  # bucket -> durations of the span `_fresh_span`
        self._fresh_span = -NUM_SPANS

    def _enter_fresh(self) -> None:
        if self._fresh:
            counts = self._advance(self._fresh_span)
            for bucket, count in self._fresh.items():
                counts[bucket] += count
                self._window[bucket] += count
            self._fresh.clear()

    def _advance(self, span: int) -> Ints:
        """Let go of the spans that are over when `span` runs; its counts [NUM_BUCKETS]."""
        row = span % NUM_SPANS
        if span > self._newest:
            over = self._spans <= span - NUM_SPANS
            self._window -= self._counts[over].sum(axis=0)
            self._counts[over] = 0
            self._spans[row] = self._newest = span
        counts: Ints = self._counts[row]
        return counts

    def add(self, span: int, ms: float, count: int = 1) -> None:
        """`count` durations of `ms`."""
        bucket = int(log2(ms / LEAST_MS) * BUCKETS_A_DOUBLING) if ms > LEAST_MS else 0
        bucket = min(bucket, NUM_BUCKETS - 1)
        if span != self._fresh_span:
            self._enter_fresh()
            self._fresh_span = span
        self._fresh[bucket] = self._fresh.get(bucket, 0) + count

    def add_all(self, span: int, ms: npt.NDArray[np.float64]) -> None:
        """One duration for each of `ms` [n]."""
        self._enter_fresh()
        doublings = np.log2(np.maximum(ms / LEAST_MS, 1.0))
        buckets = np.minimum((doublings * BUCKETS_A_DOUBLING).astype(np.int64), NUM_BUCKETS - 1)
        np.add.at(self._advance(span), buckets, 1)
        np.add.at(self._window, buckets, 1)

    def window(self, now: float) -> Percentiles:
        """Of the window that ends at `now`, in monotonic seconds."""
        return self.percentiles(int(now / SPAN_S))

    def percentiles(self, span: int) -> Percentiles:
        """Of the window that ends with `span`."""
        self._enter_fresh()
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


class LatencyMeter:
    """Follows every request from its arrival to its last token; times are monotonic seconds.

    Requests that were given a token by the same step wait equally long for the next one. While a
    step serves exactly the requests of the step before, their gap is counted once for all: they are
    the *cohort*. Only where the two differ is each request looked up.
    """

    def __init__(self) -> None:
        self._first = Histogram()
        self._between = Histogram()
        self._watches: list[Histogram] = []
        self._arrived: dict[str, float] = {}  # before their first token
        self._last: dict[str, float] = {}  # newest token, of those outside the cohort
        self._cohort: list[str] = []
        self._cohort_time = 0.0
        self._gone: set[str] = set()

    def arrived(self, request_id: str, now: float) -> None:
        """The request, or its next turn, waits for its first token from now on."""
        self._gone.discard(request_id)
        self._last.pop(request_id, None)
        if request_id in self._cohort:
            self._cohort.remove(request_id)
        self._arrived[request_id] = now

    def forget(self, request_id: str) -> None:
        """The request is over; a token of the step that ends now may still be told."""
        self._gone.add(request_id)

    def tokens(self, request_ids: list[str], now: float) -> None:
        """A step has given a token to each of `request_ids`; the list is kept, not copied."""
        if request_ids:
            span = int(now / SPAN_S)
            if request_ids == self._cohort:
                ms = (now - self._cohort_time) * 1e3
                for histogram in (self._between, *self._watches):
                    histogram.add(span, ms, len(request_ids))
            else:
                self._look_up(request_ids, span, now)
            self._cohort_time = now
        if self._gone:
            self._purge()

    def leave_out(self, since: float, now: float, *, running: bool) -> None:
        """Requests did not wait for the engine from `since` to `now`, but for whoever paused it.

        `running`: all of them, else those that the newest step did not serve.
        """

        def later(moment: float) -> float:
            return moment + now - max(moment, since)

        self._arrived = {key: later(moment) for key, moment in self._arrived.items()}
        self._last = {key: later(moment) for key, moment in self._last.items()}
        if running:
            self._cohort_time = later(self._cohort_time)

    def _look_up(self, request_ids: list[str], span: int, now: float) -> None:
        last, arrived = self._last, self._arrived
        last.update(dict.fromkeys(self._cohort, self._cohort_time))
        since = np.array([last.pop(key, np.nan) for key in request_ids])
        known = ~np.isnan(since)
        if known.any():
            for histogram in (self._between, *self._watches):
                histogram.add_all(span, (now - since[known]) * 1e3)
        if not known.all():
            for index in np.flatnonzero(~known).tolist():
                started = arrived.pop(request_ids[index], None)
                if started is not None:
                    self._first.add(span, (now - started) * 1e3)
        self._cohort = request_ids

    def _purge(self) -> None:
        gone = self._gone
        if not gone.isdisjoint(self._cohort):
            self._cohort = [key for key in self._cohort if key not in gone]
        for key in gone:
            self._last.pop(key, None)
            self._arrived.pop(key, None)
        gone.clear()

    def inter_token(self, now: float) -> Percentiles:
        """Gaps between two tokens of one request, in the window that ends now."""
        return self._between.window(now)

    def watch(self) -> Histogram:
        """Gaps between two tokens of one request that end from now on, until `unwatch`."""
        self._watches.append(Histogram())
        return self._watches[-1]

    def unwatch(self, histogram: Histogram) -> None:
        self._watches.remove(histogram)

    def document(self, now: float) -> Latency:
        span = int(now / SPAN_S)
        return Latency(
            window_s=SPAN_S * NUM_SPANS,
            ttft=self._first.percentiles(span),
            inter_token=self._between.percentiles(span),
        )

    @property
    def num_followed(self) -> int:
        """Requests that are remembered."""
        return len(self._last) + len(self._arrived) + len(self._cohort)
