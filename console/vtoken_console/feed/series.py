"""Bounded time series: samples in fixed bins, read as the columns of a chart.

Memory is NUM_BINS bins at any sample rate. Column edges are multiples of the column's span, so that
a chart moves by entire columns.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

BIN_S = 0.5
NUM_BINS = 1800  # fifteen minutes
SPANS_S = (30, 60, 120, 300, 900)
RATE_WINDOW_S = 2.0

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Marker:
    """A configuration change on the time axis: who made `revision`, and what it changed."""

    ts: float
    revision: int
    actor: str = ""
    text: str = ""
    kind: Literal["changed", "reverted", "kept"] = "changed"  # the last two end a trial


@dataclass(frozen=True, slots=True)
class Window:
    """`values` [len(names), columns], NaN if unknown; `markers`: column -> its newest marker."""

    span_s: int
    names: tuple[str, ...]
    values: F64
    markers: dict[int, Marker]

    def row(self, name: str) -> F64:
        row: F64 = self.values[self.names.index(name)]
        return row


class Series:
    """Named values over time: `add` samples at any rate, read the newest part with `window`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._sums = np.zeros((len(names), NUM_BINS))
        self._counts = np.zeros((len(names), NUM_BINS), dtype=np.int64)
        self._bins = np.full(NUM_BINS, -1, dtype=np.int64)
        self._markers: deque[Marker] = deque(maxlen=200)
        self._first_ts: float | None = None
        self.last_ts = 0.0

    def add(self, ts: float, values: tuple[float, ...]) -> None:
        """Adds one sample of all names at Unix time `ts` [s]; NaN for an unknown value."""
        number = int(ts // BIN_S)
        place = number % NUM_BINS
        if self._bins[place] != number:
            if self._bins[place] > number:
                return  # older than the oldest bin
            self._bins[place] = number
            self._sums[:, place] = 0
            self._counts[:, place] = 0
        array = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(array)
        self._sums[known, place] += array[known]
        self._counts[known, place] += 1
        self._first_ts = ts if self._first_ts is None else min(self._first_ts, ts)
        self.last_ts = max(self.last_ts, ts)

    def mark(self, marker: Marker) -> None:
        """Adds a configuration change; duplicates are ignored."""
        if marker not in self._markers:
            self._markers.append(marker)

    @property
    def markers(self) -> list[Marker]:
        """All markers, oldest first."""
        return sorted(self._markers, key=lambda marker: marker.ts)

    def newest(self, name: str) -> float:
        """The mean of the newest bin; 0 if there are no samples."""
        if self._first_ts is None:
            return 0.0
        row, place = self.names.index(name), int(self.last_ts // BIN_S) % NUM_BINS
        return float(self._sums[row, place] / max(self._counts[row, place], 1))

    def span(self) -> int:
        """The shortest of SPANS_S that covers all samples, or the longest."""
        kept = 0.0 if self._first_ts is None else self.last_ts - self._first_ts
        return next((s for s in SPANS_S if kept <= s), SPANS_S[-1])

    def window(self, span_s: int, columns: int) -> Window:
        """The newest `span_s` seconds in `columns` columns; a column is the mean of its bins."""
        columns = max(columns, 1)
        values = np.full((len(self.names), columns), np.nan)
        step = span_s / columns
        end = (math.floor(self.last_ts / step) + 1) * step
        kept = np.nonzero((self._bins * BIN_S > end - span_s - BIN_S) & (self._bins >= 0))[0]
        if len(kept):
            kept = kept[np.argsort(self._bins[kept])]
            starts = self._bins[kept] * BIN_S
            counts = self._counts[:, kept]
            means = np.where(counts > 0, self._sums[:, kept] / np.maximum(counts, 1), np.nan)
            edges = end - span_s + step * np.arange(columns + 1)
            if step >= BIN_S:
                which = np.floor((starts + BIN_S / 2 - edges[0]) / step).astype(int)
                inside = (which >= 0) & (which < columns)
                for row in range(len(self.names)):
                    known = inside & ~np.isnan(means[row])
                    hits = np.bincount(which[known], minlength=columns)
                    sums = np.bincount(which[known], means[row, known], minlength=columns)
                    values[row] = np.where(hits > 0, sums / np.maximum(hits, 1), np.nan)
            else:
                middles = (edges[:-1] + edges[1:]) / 2
                nearest = np.searchsorted(starts, middles, side="right") - 1
                near = (nearest >= 0) & (middles - starts[nearest] < 2 * BIN_S)
                values[:, near] = means[:, nearest[near]]
        markers = {
            int((m.ts - (end - span_s)) / step): m
            for m in self.markers
            if end - span_s <= m.ts < end
        }
        return Window(span_s, self.names, values, markers)


class Rate:
    """The derivative of a cumulative counter over the newest RATE_WINDOW_S seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, ts: float, total: float) -> float:
        """Adds a sample and returns the rate per second; a counter that decreases resets it."""
        if self._samples and (total < self._samples[-1][1] or ts < self._samples[-1][0]):
            self._samples.clear()
        self._samples.append((ts, total))
        while len(self._samples) > 2 and ts - self._samples[1][0] >= RATE_WINDOW_S:
            self._samples.popleft()
        first_ts, first_total = self._samples[0]
        return (total - first_total) / (ts - first_ts) if ts > first_ts else 0.0
