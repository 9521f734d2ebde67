"""A pause of vLLM's scheduling is reported, and counts neither as latency nor against a trial."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import pytest

from tests.support.core.harness import LiveEngine, make_engine
from vtoken.cli.printing import Printer
from vtoken.cli.show import status_parts, watch_line
from vtoken.cli.streaming import quiet_line
from vtoken.core.runtime.latency import LatencyMeter
from vtoken.sentences.situation import MAX_LENGTH, situation
from vtoken.wire import Status

REQUESTS = ["a", "b"]


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    with make_engine() as live:
        live.steps(30)
        yield live


def status_of(engine: LiveEngine) -> Status:
    status: Status = engine.call("status")
    status.fragmentation.sentence = situation(status)
    return status


# ---------------------------------------------------------------- reports


def test_begin_and_end_of_a_pause_are_reported(engine: LiveEngine) -> None:
    scheduling = engine.reporter.scheduling
    before = status_of(engine)
    assert (before.scheduling, before.paused_since_ts) == ("running", None)
    scheduling.changed("paused", 100.0)
    paused = status_of(engine)
    assert paused.scheduling == "paused"
    assert paused.paused_since_ts == pytest.approx(time.time(), abs=5)
    assert paused.fragmentation.sentence == (
        "PAUSED: vLLM schedules nothing until it is resumed; 4 requests are suspended, 0 wait."
    )
    assert paused.fragmentation.cause == before.fragmentation.cause
    scheduling.changed("paused", 101.0)  # reported twice
    scheduling.changed("running", 112.5)
    after = status_of(engine)
    assert (after.scheduling, after.paused_since_ts) == ("running", None)
    assert not after.fragmentation.sentence.startswith("Paused")
    events = engine.call("events", kind="server").events
    assert [event.summary for event in events] == [
        "scheduling paused: no request runs until it is resumed",
        "scheduling resumed after 12.5 s",
    ]
    assert [event.data for event in events] == [
        {"detail": "paused", "scheduling": "paused"},
        {"detail": "resumed", "scheduling": "running"},
    ]


def test_a_pause_for_new_requests_is_reported(engine: LiveEngine) -> None:
    engine.reporter.scheduling.changed("paused_new", 1.0)
    assert status_of(engine).scheduling == "paused_new"
    assert status_of(engine).fragmentation.sentence == (
        "PAUSED: vLLM starts no new request until it is resumed; 4 running, 0 wait."
    )


def test_the_command_line_shows_a_pause(engine: LiveEngine) -> None:
    engine.reporter.scheduling.changed("paused", 1.0)
    paused = status_of(engine)
    lines = [line for part in status_parts(paused) for line in Printer().rendered(part)]
    assert lines[0] == paused.fragmentation.sentence
    assert any("4 running, 0 waiting" in line and ", paused since " in line for line in lines)
    assert "  paused      free" in click.unstyle(watch_line(paused, None))
    assert "no step for" not in quiet_line(paused, paused.ts + 60)


def test_the_sentence_of_a_pause_is_short(engine: LiveEngine) -> None:
    status = status_of(engine)
    for status.scheduling in ("paused", "paused_new"):
        status.requests.running = status.requests.waiting = 100_000
        assert len(situation(status)) <= MAX_LENGTH
    status.scheduling, status.requests.running, status.requests.waiting = "paused", 1, 1
    assert "1 request is suspended, 1 waits." in situation(status)


# ---------------------------------------------------------------- what is not measured


def test_a_pause_does_not_count_as_inter_token_time() -> None:
    meter = LatencyMeter()
    watched = meter.watch(0.0)
    for key in (*REQUESTS, "early"):
        meter.arrived(key, 0.0)
    meter.tokens(REQUESTS, 1.0)
    meter.leave_out(1.01, 31.01, running=True)
    meter.tokens(REQUESTS, 31.02)  # 20 ms without the pause
    meter.tokens([*REQUESTS, "early"], 31.04)
    found = meter.document(31.04)
    assert found.inter_token.count == 4
    assert found.inter_token.p99_ms == pytest.approx(20, rel=0.03)
    assert watched.document(31.04).inter_token.p99_ms == found.inter_token.p99_ms
    assert found.ttft.p99_ms == pytest.approx(1_040, rel=0.03)


def test_a_request_that_comes_or_is_served_during_a_pause_waits_from_its_end_on() -> None:
    meter = LatencyMeter()
    meter.arrived("a", 0.0)
    meter.tokens(["a"], 10.5)  # of the step that was under way
    meter.arrived("b", 20.0)
    meter.leave_out(10.0, 30.0, running=True)
    meter.tokens(["a", "b"], 30.1)
    found = meter.document(30.1)
    assert found.inter_token.p50_ms == pytest.approx(100, rel=0.03)
    assert found.ttft.p50_ms == pytest.approx(100, rel=0.03)


def test_running_requests_are_measured_during_a_pause_for_new_ones() -> None:
    meter = LatencyMeter()
    meter.arrived("runs", 0.0)
    meter.arrived("waits", 0.0)
    meter.tokens(["runs"], 1.0)
    meter.leave_out(0.5, 1.5, running=False)
    meter.tokens(["runs", "waits"], 2.0)
    found = meter.document(2.0)
    assert found.inter_token.p50_ms == pytest.approx(1_000, rel=0.03)
    assert found.ttft.count == 2
    assert found.ttft.p99_ms == pytest.approx(1_000, rel=0.03)


def test_preemptions_of_a_pause_do_not_count_for_a_guard(engine: LiveEngine) -> None:
    scheduling = engine.reporter.scheduling
    engine.call(
        "patch_config", patch={"batch_size": 7}, guards=[{"metric": "preemptions", "above": 1}]
    )
    scheduling.changed("paused", 1.0)
    for _ in range(4):  # vLLM empties its caches
        engine.core.preempt_newest()
    assert engine.call("config").trial is not None
    scheduling.changed("running", 9.0)
    engine.steps(3)
    assert engine.call("config").trial is not None
    assert status_of(engine).requests.preempted == 4
    engine.core.preempt_newest()
    engine.steps()
    assert engine.call("config").trial is not None
    engine.core.preempt_newest()
    engine.steps()
    assert engine.call("config").trial is None  # these two were for lack of blocks
    config = engine.call("events", kind="config").events
    assert config[-1].data["reason"] == "preemptions 2 > 1"
