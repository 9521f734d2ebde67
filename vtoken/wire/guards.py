"""Guards as data: the series of the metrics table that a guard may be on, and guards as text.

1. a guard may be on any series of `vtoken.wire.metrics` that a change can make worse: gauges,
   counters, and rates of counters. Settings and histograms are refused
2. a counter counts from the change on, so it has an upper limit only; its rate has both
3. a value that is a mean, a percentile or a rate rests on at least `min_count` samples; a rate's
   samples are the seconds that it was measured over
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from vtoken.base.errors import RefusedError
from vtoken.base.quantities import number_text, time_text
from vtoken.wire import GUARD_COUNT, MAX_GUARD_COUNT, MAX_GUARDS, Guard, Status
from vtoken.wire.metrics import METRICS, Evidence, Labels, Metric

BY_NAME = {metric.name: metric for metric in METRICS if metric.guards}
ALIASES = {"goodput": "goodput_ratio"}
_SERIES = re.compile(r"(?:rate\((?P<rate>.*)\)|(?P<plain>.*))")
_METRIC = re.compile(r"([a-z0-9_]+)(?:\{(.*)\})?")
_GUARD = re.compile(
    r"(?P<metric>[^<>]+)(?P<side>[<>])(?P<limit>[^<>]+?)(?:\s+over\s+(?P<count>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Series:
    """One number of a status over time: a metric with the values of its labels, or its rate."""

    metric: Metric[Status]
    labels: Labels = ()
    is_rate: bool = False

    def __str__(self) -> str:
        pairs = zip(self.metric.labels, self.labels, strict=True)
        labels = ",".join(f"{name}={value}" for name, value in pairs)
        text = f"{self.metric.name}{{{labels}}}" if labels else self.metric.name
        return f"rate({text})" if self.is_rate else text

    @property
    def title(self) -> str:
        """What sentences call it."""
        return str(self) if self.is_rate else self.metric.titles.get(self.labels, str(self))

    @property
    def is_counter(self) -> bool:
        """Whether it counts from the change on."""
        return self.metric.kind == "counter" and not self.is_rate

    @property
    def samples(self) -> str:
        """What a value rests on; empty if on nothing but itself."""
        return "seconds" if self.is_rate else self.metric.samples

    def read(self, status: Status) -> float | None:
        """The metric's value, of a rate the counter's; None if it has none now."""
        for labels, value in self.metric.read(status):
            if labels == self.labels and isinstance(value, int | float):
                return float(value)
        return None

    def evidence(self, status: Status) -> Evidence | None:
        """What the value rests on; None for one that needs nothing, and for a rate."""
        found = self.metric.evidence
        return None if found is None else found(status, self.labels)

    def shown(self, value: float, digits: int = 3) -> str:
        """`value` with its unit; `digits`: significant ones of a fraction."""
        if self.metric.name.endswith("_seconds") and not self.is_rate:
            return time_text(value * 1e3, digits)
        return number_text(value, digits)


def offered() -> list[Series]:
    """Every series that a guard may be on; rates are those of the counters."""
    found = []
    for metric in BY_NAME.values():
        labels: list[Labels] = [()]
        for values in metric.labels.values():
            labels = [(*before, value) for before in labels for value in values]
        found += [Series(metric, values) for values in labels]
    return found


def series_of(text: str) -> Series:
    """The series that `text` names, as Prometheus writes it, with or without quotes.

    Raises RefusedError with the names that exist.
    """
    found = _SERIES.fullmatch(text.replace('"', "").replace(" ", ""))
    is_rate = found is not None and found["rate"] is not None
    parts = _METRIC.fullmatch(found["rate"] or found["plain"]) if found else None
    metric = BY_NAME.get(ALIASES.get(parts[1], parts[1])) if parts else None
    if parts is None or metric is None or (is_rate and metric.kind != "counter"):
        counters = [name for name, known in BY_NAME.items() if known.kind == "counter"]
        bound = f"one of rate({'|'.join(counters)})" if is_rate else f"one of {', '.join(BY_NAME)}"
        kind = "counter" if is_rate else "metric"
        raise _refusal(f"{text!r} is no {kind} that a guard may be on", text, bound)
    given = dict(pair.partition("=")[::2] for pair in (parts[2] or "").split(",") if pair)
    labels = tuple(given.get(name, "") for name in metric.labels)
    known = all(
        value in metric.labels[name] for name, value in zip(metric.labels, labels, strict=True)
    )
    if not known or len(given) != len(metric.labels):
        every = [str(series) for series in offered() if series.metric is metric]
        raise _refusal(
            f"{text!r} is no series of {metric.name}", text, f"one of {', '.join(every)}"
        )
    return Series(metric, labels, is_rate)


def checked(guards: Sequence[Guard]) -> list[Guard]:
    """The guards with their metrics' full names and their defaults; raises RefusedError."""
    if len(guards) > MAX_GUARDS:
        raise _refusal("too many guards", len(guards), f"at most {MAX_GUARDS}")
    return [_checked(guard) for guard in guards]


def _checked(guard: Guard) -> Guard:
    series = series_of(guard.metric)
    if None not in (guard.above, guard.below) or not math.isfinite(guard.limit):
        raise _refusal(
            f"the guard on {series} needs one limit",
            msgspec.to_builtins(guard),
            "either above or below, a number",
        )
    if series.is_counter and guard.below is not None:
        raise _refusal(
            f"{series} counts from 0 at the change, so a guard cannot be below a number",
            guard.below,
            f"above; or below, on rate({series})",
        )
    count = guard.min_count
    if count is None:
        count = GUARD_COUNT if series.samples else None
    elif not series.samples:
        raise _refusal(
            f"{series} rests on no samples", count, "min_count only for means, percentiles, rates"
        )
    elif not 1 <= count <= MAX_GUARD_COUNT:
        raise _refusal(f"min_count = {count}", count, f"1..{MAX_GUARD_COUNT}")
    return Guard(metric=str(series), above=guard.above, below=guard.below, min_count=count)


def _refusal(detail: str, value: object, bound: str) -> RefusedError:
    return RefusedError(f"{detail}; {bound}", field="guards", value=value, bound=bound)


# ---------------------------------------------------------------- text


def parse_guard(text: str) -> Guard:
    """The guard of `METRIC>LIMIT` or `METRIC<LIMIT`, with ` over N` for `min_count`.

    Raises ValueError; the engine checks the metric.
    """
    found = _GUARD.fullmatch(text.strip())
    try:
        limit = math.nan if found is None else float(found["limit"])
    except ValueError:
        limit = math.nan
    if found is None or not math.isfinite(limit):
        raise ValueError(
            f"{text!r} is not METRIC>NUMBER or METRIC<NUMBER, with ` over N` or without"
        )
    guard = Guard(metric=found["metric"].strip())
    if found["side"] == ">":
        guard.above = limit
    else:
        guard.below = limit
    guard.min_count = None if found["count"] is None else int(found["count"])
    return guard


def guard_text(guard: Guard) -> str:
    """`p95 inter-token > 40 ms over 20 tokens or more`: when the change is reverted."""
    series = _known(guard)
    over = f" over {guard.min_count} {series.samples} or more" if guard.min_count else ""
    sign = ">" if guard.below is None else "<"
    return f"{series.title} {sign} {series.shown(guard.limit, 6)}{over}"


def held_text(guard: Guard) -> str:
    """`p95 inter-token <= 40 ms (now 12 ms)`, and the samples so far: what has to hold."""
    series = _known(guard)
    now = "-" if guard.value is None else series.shown(guard.value)
    so_far = (
        f", {guard.count or 0} of {guard.min_count} {series.samples}" if guard.min_count else ""
    )
    sign = "<=" if guard.below is None else ">="
    return f"{series.title} {sign} {series.shown(guard.limit, 6)} (now {now}){so_far}"


def _known(guard: Guard) -> Series:
    """The guard's series; one without labels or unit if a newer engine names it."""
    try:
        return series_of(guard.metric)
    except RefusedError:
        samples = "" if guard.min_count is None else "samples"
        return Series(Metric(guard.metric, "", lambda _: None, samples=samples))
