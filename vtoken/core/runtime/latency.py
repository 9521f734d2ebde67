"""Engine-side latency: recent percentiles of time to first token and between tokens, and goodput.

Independent of vLLM. Input: arrivals, the requests that each step gave a token, ends, and monotonic
time. A preempted request's gap counts, because its user waits; an output of several tokens counts
as one gap, as in vLLM's own metrics. `vtoken.wire.Slo` defines goodput.

Histograms have buckets whose bounds grow by 2^(1/16) and report a bucket's middle, so a percentile
(nearest rank) is off by at most 2.2% between 0.01 ms and 2.9 hours; values beyond are reported as
that bound. Counts are stored in `NUM_SPANS` spans of `SPAN_S`, of which the oldest is dropped as a
unit, so the window covers the last 55 to 60 seconds. Memory is constant.
"""

from __future__ import annotations

from math import inf, log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints
from vtoken.wire import Latency, Percentiles, Slo
from vtoken.wire.objectives import Objectives

SPAN_S = 5.0
NUM_SPANS = 12
LEAST_MS = 0.01
BUCKETS_A_DOUBLING = 16
NUM_BUCKETS = 30 * BUCKETS_A_DOUBLING


class SpanCounts:
    """Counts [n] over the newest spans; spans are numbered by time.

    `_window` is the sum of `_counts` over the spans in the window, maintained incrementally.
    """

    def __init__(self, num: int) -> None:
        self._counts = np.zeros((NUM_SPANS, num), dtype=np.int64)
        self._spans = np.full(NUM_SPANS, -NUM_SPANS, dtype=np.int64)  # the span in each row
        self._window = np.zeros(num, dtype=np.int64)
        self._newest = -NUM_SPANS

    def count(self, span: int, index: int, count: int = 1) -> None:
        """Add to one of the counts."""
        self._advance(span)[index] += count
        self._window[index] += count

    def window(self, span: int) -> Ints:
        """The counts [n] of the window that ends with `span`. Do not write to it."""
        self._advance(span)
        return self._window

    def _advance(self, span: int) -> Ints:
        """Drop spans outside the window that ends with `span`; its counts [n]."""
        row = span % NUM_SPANS
        if span > self._newest:
            over = self._spans <= span - NUM_SPANS
            self._window -= self._counts[over].sum(axis=0)
            self._counts[over] = 0
            self._spans[row] = self._newest = span
        counts: Ints = self._counts[row]
        return counts


class Histogram(SpanCounts):
    """Counts of durations, by bucket."""

    def __init__(self) -> None:
        super().__init__(NUM_BUCKETS)

    def add(self, span: int, ms: float, count: int = 1) -> None:
        """Add `count` durations of `ms`."""
        bucket = int(log2(ms / LEAST_MS) * BUCKETS_A_DOUBLING) if ms > LEAST_MS else 0
        self.count(span, min(bucket, NUM_BUCKETS - 1), count)

    def add_all(self, span: int, ms: npt.NDArray[np.float64]) -> None:
        """Add the durations `ms` [n]."""
        doublings = np.log2(np.maximum(ms / LEAST_MS, 1.0))
        buckets = np.minimum((doublings * BUCKETS_A_DOUBLING).astype(np.int64), NUM_BUCKETS - 1)
        np.add.at(self._advance(span), buckets, 1)
        np.add.at(self._window, buckets, 1)

    def percentiles(self, span: int) -> Percentiles:
        """Percentiles of the window that ends with `span`."""
        below = np.cumsum(self.window(span))
        count = int(below[-1])
        if count == 0:
            return Percentiles(count=0)
        ranks = [-(-percent * count // 100) for percent in (50, 95, 99)]
        p50, p95, p99 = (
            LEAST_MS * 2 ** ((bucket + 0.5) / BUCKETS_A_DOUBLING)
            for bucket in np.searchsorted(below, ranks).tolist()
        )
        return Percentiles(count=count, p50_ms=p50, p95_ms=p95, p99_ms=p99)


class FirstToken(NamedTuple):
    """A request's first token: how long after its arrival it came, and when."""

    after_s: float
    at: float


class End(NamedTuple):
    """When a request ended, with how many tokens."""

    at: float
    num_tokens: int


class Latencies:
    """Times to first token and times between tokens, over the newest spans, and which of the
    requests that ended met the `objectives`.

    A request counts for these if it got its first token since `since`, or none.
    """

    def __init__(self, objectives: Objectives, since: float = -inf) -> None:
        self.first = Histogram()
        self.between = Histogram()
        self._since = since
        self.set_objectives(objectives)

    def set_objectives(self, objectives: Objectives) -> None:
        """Judge requests by these from now on, and forget those that were judged before."""
        self._objectives = objectives
        self._judged = SpanCounts(2)  # missed, met

    def judge(self, now: float, first: FirstToken, itl_s: float) -> None:
        """Count a request with its time to its first token and between its tokens."""
        if first.at >= self._since:
            met = self._objectives.met(first.after_s, itl_s)
            self._judged.count(int(now / SPAN_S), int(met))

    def slo(self, now: float, objectives: Objectives) -> Slo | None:
        """Those that were judged by `objectives` in the window that ends at `now`; None without."""
        if not objectives.text:
            return None
        missed, met = 0, 0
        if objectives == self._objectives:
            missed, met = self._judged.window(int(now / SPAN_S)).tolist()
        return Slo(
            text=objectives.text,
            window_s=SPAN_S * NUM_SPANS,
            count=missed + met,
            met=met,
            share=met / (missed + met) if missed + met else None,
        )

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
        self._objectives = Objectives()
        self._latencies = Latencies(self._objectives)
        self._watched: list[Latencies] = []
        self._arrived: dict[str, float] = {}  # before their first token
        self._first: dict[str, FirstToken] = {}  # of the others
        self._last: dict[str, float] = {}  # newest token of requests outside the cohort
        self._cohort: list[str] = []
        self._cohort_time = 0.0
        self._finished: dict[str, End] = {}

    def set_objectives(self, objectives: Objectives) -> None:
        """Judge the requests that end from now on by these."""
        if objectives != self._objectives:
            self._objectives = objectives
            for latencies in (self._latencies, *self._watched):
                latencies.set_objectives(objectives)

    def arrived(self, request_id: str, now: float) -> None:
        """The request, or its next turn, starts waiting for its first token."""
        for known in (self._finished, self._first, self._last):
            known.pop(request_id, None)
        if request_id in self._cohort:
            self._cohort.remove(request_id)
        self._arrived[request_id] = now

    def discard(self, request_id: str, num_tokens: int, now: float) -> None:
        """The request has ended with `num_tokens` tokens; the current step may still report one for
        it. Only the first call for a request counts.
        """
        self._finished.setdefault(request_id, End(now, num_tokens))

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
            self._purge(now)

    def leave_out(self, since: float, now: float, *, running: bool) -> None:
        """Exclude a pause from `since` to `now` from all gaps.

        `running`: of all requests, else only of those that the newest step did not serve.
        """

        def shifted(moment: float) -> float:
            return moment + now - max(moment, since)

        self._arrived = {key: shifted(moment) for key, moment in self._arrived.items()}
        self._last = {key: shifted(moment) for key, moment in self._last.items()}
        kept = set() if running else {*self._cohort}
        for key, first in self._first.items():
            if key not in kept:
                self._first[key] = first._replace(at=shifted(first.at))
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
                    self._first[request_ids[index]] = FirstToken(now - started, now)
                    for latencies in (self._latencies, *self._watched):
                        latencies.first.add(span, (now - started) * 1e3)
        self._cohort = request_ids

    def _purge(self, now: float) -> None:
        """Judge and forget the requests that have ended."""
        finished = self._finished
        served = finished.keys() & {*self._cohort}
        if served:
            self._last.update(dict.fromkeys(served, self._cohort_time))
            self._cohort = [key for key in self._cohort if key not in served]
        for key, end in finished.items():
            last, arrived = self._last.pop(key, end.at), self._arrived.pop(key, None)
            first = self._first.pop(key, None)
            if first is None:
                if arrived is None or end.at - arrived <= self._objectives.ttft_s:
                    continue
                first = FirstToken(end.at - arrived, end.at)
            itl_s = (last - first.at) / (end.num_tokens - 1) if end.num_tokens > 1 else 0.0
            for latencies in (self._latencies, *self._watched):
                latencies.judge(now, first, itl_s)
        finished.clear()

    def watch(self, now: float) -> Latencies:
        """The times that end from `now` on, until `unwatch`."""
        self._watched.append(Latencies(self._objectives, now))
        return self._watched[-1]

    def unwatch(self, latencies: Latencies) -> None:
        self._watched.remove(latencies)

    def document(self, now: float) -> Latency:
        return self._latencies.document(now)

    def slo(self, now: float, objectives: Objectives) -> Slo | None:
        return self._latencies.slo(now, objectives)
