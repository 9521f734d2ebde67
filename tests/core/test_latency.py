"""Latency percentiles are within the stated error of the exact ones, over one minute, for requests
that arrive, pause and finish in any order.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.harness import make_engine
from tests.support.latency import num_tracked
from vtoken.base.errors import RefusedError
from vtoken.core.runtime.latency import (
    BUCKETS_A_DOUBLING,
    LEAST_MS,
    NUM_SPANS,
    SPAN_S,
    Histogram,
    LatencyMeter,
)
from vtoken.wire import Percentiles, Slo, Status
from vtoken.wire.objectives import FORM, parse_objectives

MAX_RELATIVE_ERROR = 2 ** (0.5 / BUCKETS_A_DOUBLING) - 1  # half a bucket
BOUND = 1.0 + MAX_RELATIVE_ERROR + 1e-9
WINDOW_S = SPAN_S * NUM_SPANS


def near(value: float) -> object:
    return pytest.approx(value, rel=MAX_RELATIVE_ERROR + 1e-9)


@given(st.lists(st.floats(LEAST_MS, 1e6), min_size=1, max_size=300), st.booleans())
def test_percentiles_are_those_of_numpy_within_the_stated_error(
    values: list[float], together: bool
) -> None:
    histogram = Histogram()
    if together:
        histogram.add_all(7, np.array(values))
    else:
        for value in values:
            histogram.add(7, value)
    found = histogram.percentiles(7)
    assert found.count == len(values)
    ordered = np.sort(values)
    for percent, report in ((50, found.p50_ms), (95, found.p95_ms), (99, found.p99_ms)):
        rank = -(-percent * len(values) // 100)
        assert report == near(ordered[rank - 1])
    if len(values) % 100 == 0:
        exact = np.percentile(values, [50, 95, 99], method="inverted_cdf")
        assert [found.p50_ms, found.p95_ms, found.p99_ms] == [near(x) for x in exact]


def test_stated_error_is_below_five_percent_and_numpy_agrees_on_many_values() -> None:
    assert MAX_RELATIVE_ERROR < 0.05
    values = np.random.default_rng(0).lognormal(3.0, 1.5, 10_000)
    histogram = Histogram()
    histogram.add_all(0, values)
    found = histogram.percentiles(0)
    exact = np.percentile(values, [50, 95, 99], method="inverted_cdf")
    assert [found.p50_ms, found.p95_ms, found.p99_ms] == [near(x) for x in exact]


@pytest.mark.parametrize("ms", [0.0, -5.0, 1e-9, 1e12])
def test_durations_out_of_range_are_reported_as_the_bound(ms: float) -> None:
    one, many = Histogram(), Histogram()
    one.add(0, ms)
    many.add_all(0, np.array([ms]))
    low, high = LEAST_MS / BOUND, 0.01 * 2**30 * BOUND
    for histogram in (one, many):
        report = histogram.percentiles(0).p50_ms
        assert report is not None
        assert low <= report <= high
        assert (report > 1e6) == (ms > 1)


def test_window_forgets_what_is_older_than_a_minute_and_reuses_its_rows() -> None:
    histogram = Histogram()
    histogram.add(3, 100.0)
    histogram.add(3 + NUM_SPANS - 1, 1.0)
    assert histogram.percentiles(3 + NUM_SPANS - 1).count == 2
    assert histogram.percentiles(3 + NUM_SPANS) == Percentiles(
        count=1,
        p50_ms=near(1.0),
        p95_ms=near(1.0),
        p99_ms=near(1.0),  # type: ignore[arg-type]
    )
    histogram.add(3 + NUM_SPANS, 10.0)  # takes the row of the first one
    assert histogram.percentiles(3 + NUM_SPANS).count == 2
    assert histogram.percentiles(3 + 3 * NUM_SPANS) == Percentiles(count=0)


def test_first_tokens_and_gaps_by_hand() -> None:
    meter = LatencyMeter()
    meter.arrived("a", 10.0)
    meter.arrived("b", 10.1)
    meter.tokens(["a"], 10.4)  # a: 400 ms to the first token
    meter.tokens(["a"], 10.5)  # 100 ms
    meter.tokens(["a", "b"], 10.6)  # 100 ms; b: 500 ms to the first
    meter.tokens(["a", "b"], 10.8)  # 200 ms, twice
    report = meter.document(11.0)
    assert report.window_s == WINDOW_S
    assert (report.ttft.count, report.inter_token.count) == (2, 4)
    assert report.ttft.p50_ms == near(400.0)
    assert report.ttft.p99_ms == near(500.0)
    assert report.inter_token.p50_ms == near(100.0)
    assert report.inter_token.p95_ms == near(200.0)


def test_gap_of_a_preempted_request_counts_as_a_whole() -> None:
    meter = LatencyMeter()
    for name in "ab":
        meter.arrived(name, 0.0)
    meter.tokens(["a", "b"], 1.0)
    for step in range(1, 21):
        meter.tokens(["a"], 1.0 + step / 10)  # b waits
    meter.tokens(["a", "b"], 3.1)
    report = meter.document(3.1).inter_token
    assert report.count == 22
    assert report.p50_ms == near(100.0)
    assert report.p99_ms == near(2100.0)


def test_last_token_of_a_request_counts_and_then_it_is_forgotten() -> None:
    meter = LatencyMeter()
    meter.arrived("a", 0.0)
    meter.tokens(["a"], 1.0)
    meter.discard("a", 2, 1.5)  # the engine frees it while it takes the step in
    meter.tokens(["a"], 1.5)
    assert meter.document(2.0).inter_token.count == 1
    assert num_tracked(meter) == 0
    meter.tokens(["a"], 2.0)  # of an unknown one: neither first token nor gap
    assert meter.document(2.0).ttft.count == 1
    assert meter.document(2.0).inter_token.count == 1


def test_request_that_comes_again_under_its_name_starts_anew() -> None:
    meter = LatencyMeter()
    meter.arrived("a", 0.0)
    meter.tokens(["a"], 1.0)
    meter.discard("a", 1, 4.0)
    meter.arrived("a", 5.0)
    meter.tokens(["a"], 5.25)
    report = meter.document(6.0)
    assert (report.ttft.count, report.inter_token.count) == (2, 0)
    assert report.ttft.p50_ms == near(250.0)


@settings(max_examples=60)
@given(st.data())
def test_meter_counts_what_a_dictionary_of_times_would(data: st.DataObject) -> None:
    """Cohorts that form, split and merge, while requests arrive and finish."""
    meter = LatencyMeter()
    names = st.sampled_from("abcdef")
    now = 0.0
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    first: list[float] = []
    between: list[float] = []
    served: list[str] = []
    given: dict[str, list[float]] = {}  # the times of an arrival and of the tokens since
    judged: list[bool] = []
    objectives = parse_objectives("ttft<100ms, itl<30ms")
    meter.set_objectives(objectives)
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.01, 0.02, 0.3]))
        for name in data.draw(st.lists(names, max_size=2, unique=True)):
            meter.arrived(name, now)
            arrived[name] = now
            given[name] = [now]
            last.pop(name, None)
        if data.draw(st.booleans()):
            served = data.draw(st.lists(names, max_size=6, unique=True))
        gone = data.draw(st.lists(names, max_size=1))
        for name in given.keys() & {*served}:
            given[name].append(now)
        for name in gone:
            start, *tokens = given.pop(name, [now])
            meter.discard(name, len(tokens), now)
            meter.discard(name, 0, now + 1)  # the engine says so twice
            if tokens:
                mean = (tokens[-1] - tokens[0]) / max(1, len(tokens) - 1)
                judged.append(tokens[0] - start <= 0.1 and mean <= 0.03)
            elif now - start > 0.1:
                judged.append(False)
        meter.tokens(list(served), now)
        for name in served:
            if name in last:
                between.append((now - last[name]) * 1e3)
            elif name in arrived:
                first.append((now - arrived.pop(name)) * 1e3)
            last[name] = now
        for name in gone:
            last.pop(name, None)
            arrived.pop(name, None)
        assert num_tracked(meter) == len(last) + len(arrived)
    slo = meter.slo(now, objectives)
    assert slo is not None
    assert (slo.count, slo.met) == (len(judged), sum(judged))
    assert meter.slo(now, parse_objectives("")) is None
    report = meter.document(now)
    for values, found in ((first, report.ttft), (between, report.inter_token)):
        assert found.count == len(values)
        if values:
            rank = -(-95 * len(values) // 100)
            assert found.p95_ms == near(max(LEAST_MS, sorted(values)[rank - 1]))


def test_goodput_leaves_a_pause_out_forgets_after_a_minute_and_begins_anew_with_objectives() -> (
    None
):
    strict, lax = parse_objectives("itl < 100ms"), parse_objectives("itl<100ms, ttft<1min")
    meter = LatencyMeter()
    meter.set_objectives(strict)
    for name in "ab":
        meter.arrived(name, 0.0)
    meter.tokens(["a", "b"], 1.0)
    meter.leave_out(1.05, 31.05, running=True)
    watch = meter.watch(31.06)
    for at in (31.1, 31.15):
        meter.tokens(["a", "b"], at)
    meter.discard("a", 3, 31.15)
    meter.tokens(["b"], 40.0)
    meter.arrived("c", 40.0)
    meter.discard("b", 4, 40.0)
    meter.tokens(["c"], 40.0)
    found = meter.slo(40.0, strict)
    assert found == Slo(text="itl<100ms", window_s=WINDOW_S, count=2, met=1, share=0.5)
    meter.discard("c", 1, 41.0)
    meter.tokens([], 41.0)
    since = watch.slo(41.0, strict)
    assert since is not None
    assert (since.count, since.share) == (1, 1.0)  # the others began before
    assert meter.slo(41.0, lax) == Slo(text=lax.text, window_s=WINDOW_S)
    meter.set_objectives(lax)
    for objectives, now in ((lax, 41.0), (strict, 41.0), (lax, 41.0 + WINDOW_S)):
        found = meter.slo(now, objectives)
        assert found is not None
        assert (found.count, found.share) == (0, None)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", (math.inf, math.inf)),
        (" ttft < 2s,itl<80ms ", (2.0, 0.08)),
        ("itl<.5s", (math.inf, 0.5)),
        ("ttft<1.5min", (90.0, math.inf)),
    ],
)
def test_objectives_are_text_with_units(text: str, limits: tuple[float, float]) -> None:
    found = parse_objectives(text)
    assert (found.ttft_s, found.itl_s) == pytest.approx(limits)
    assert parse_objectives(found.text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ttft", "is not NAME<TIME"),
        ("ttft>2s", "is not NAME<TIME"),
        ("ttft<-2s", "is not NAME<TIME"),
        ("ttft<2s,", "is not NAME<TIME"),
        ("tpot<80ms", "tpot is none of ttft, itl"),
        ("ttft<2s, ttft<3s", "ttft is there twice"),
        ("ttft<2", "2 has no unit of ms, s, min"),
        ("ttft<2h", "2h has no unit of ms, s, min"),
        ("ttft<0s", "ttft needs a time above 0"),
    ],
)
def test_objectives_that_cannot_be_read_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(why)) as caught:
        parse_objectives(text)
    assert (caught.value.field, caught.value.bound) == ("slo", FORM)


def test_status_tells_latency_of_every_token_that_was_given() -> None:
    with make_engine(concurrency=3, max_tokens=8) as engine:
        engine.steps(20)
        status: Status = engine.call("status")
        assert status.latency is not None
        assert status.latency.ttft.count > 3
        report = status.latency.ttft.count + status.latency.inter_token.count
        assert report == status.tokens.generated
        assert num_tracked(engine.core.runtime.latency) == 3
