"""The verdict of a headless run: every kind of problem makes it fail."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from vtoken import wire
from vtoken.demo import report as demo_report
from vtoken.demo.exercise import Row
from vtoken.demo.report import Report, Stream, samples, summarize
from vtoken.demo.traffic import Answer, TrafficReport


def make_status(
    *, used: int = 30, running: int = 2, moved: int = 5, violations: int = 0
) -> wire.Status:
    return wire.Status(
        schema=1,
        vtoken_version="1",
        vllm_version="2",
        model="m",
        device="cpu",
        epoch="e",
        step=1,
        ts=0.0,
        block_size=16,
        blocks=wire.BlockCounts(
            total=100,
            free=100 - used,
            used=used,
            partially_live=1,
            low_utilization=1,
            shared=0,
            headroom=2,
        ),
        tokens=wire.TokenCounts(live=1, dead=1),
        fragmentation=wire.Fragmentation(f=0.25, theta_f=0.5, cause="ok"),
        reclamation=wire.Reclamation(
            state="auto",
            in_flight=0,
            relocations=1,
            moved_tokens=moved,
            moved_bytes=10,
            reclaimed_blocks=3,
            recycled_slots=0,
            held_blocks=used,
            blocks_without_reclaim=2 * used,
            packed_bound_blocks=used - 10,
        ),
        policy=wire.PolicyChoice(name="none"),
        budget_tokens=1,
        interval_tokens=1,
        requests=wire.RequestCounts(running=running, waiting=0, preempted=0),
        invariants=wire.Invariants(checked=9, violations=violations),
        config_revision=1,
    )


def make_report(**changes: Any) -> Report:
    given: dict[str, Any] = {
        "traffic": TrafficReport(requests=3, done=3, ttft_s=[0.1, 0.2], latency_s=[1.0, 2.0]),
        "rows": [
            Row("pause", "reclamation auto → paused", step=4, reply_ms=20.0, seen_ms=120.0),
            Row("compact", "freed 2", reply_ms=900.0),
        ],
        "samples": [make_status(), make_status(used=50, moved=25), make_status(used=0, running=0)],
        "last": make_status(moved=45),
        "stream": Stream(messages=10, gaps=0, dropped_events=0, recording="r.ndjson"),
    } | changes
    return summarize(
        given["traffic"],
        given["rows"],
        1,
        given["samples"],
        given["last"],
        given["stream"],
        duration_s=60.0,
    )


def test_a_good_run_passes_and_averages_over_samples_with_a_running_request() -> None:
    report = make_report()
    assert report.failures == []
    blocks = report.blocks
    assert (blocks.held, blocks.without_reclaim, blocks.packed_bound) == (40.0, 80.0, 30.0)
    assert report.counters["moved_tokens"] == 40
    assert (report.largest_reply_ms, report.largest_seen_ms) == (20.0, 120.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"traffic": TrafficReport(done=3, failed=1, failures=["500"])}, "1 requests failed: 500"),
        ({"traffic": TrafficReport()}, "no request finished"),
        ({"rows": [Row("undo", "not restored", ok=False)]}, "control undo: not restored"),
        ({"last": make_status(violations=2)}, "2 invariant violations"),
        ({"stream": Stream(9, 1, 0, "r")}, "1 gaps in the stream's seq"),
        ({"samples": []}, "the stream had no status while a request ran"),
    ],
)
def test_each_fault_fails_the_run(changes: dict[str, Any], says: str) -> None:
    report = make_report(**changes)
    assert report.failures == [says]
    text = shown(report)
    assert f"failed: {says}" in text
    assert "FAILED after 60 s" in text


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140)
    demo_report.show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_what_was_held_against_both_bounds() -> None:
    text = shown(make_report())
    assert "80.0 (held is -50.0%)" in text
    assert "30.0 (held is +33.3%)" in text
    assert "passed after 60 s" in text


def make_answer(kind: str, text: str, reason: str = "stop") -> Answer:
    return Answer(
        kind=kind,
        title="Python's topic 'for'",
        turn=1,
        question="What is it about?",
        text=text,
        prompt_tokens=1200,
        output_tokens=9,
        finish_reason=reason,
    )


def test_the_summary_shows_an_answer_of_each_kind_preferably_one_that_was_not_cut_off() -> None:
    answers = [
        make_answer("passage", "It is about [loops]", "length"),
        make_answer("chat", "Paris."),
        make_answer("passage", "It is about loops."),
    ]
    assert samples(answers) == answers[1:]
    assert samples(answers[:1]) == answers[:1]
    text = shown(make_report(traffic=TrafficReport(done=3, answers=answers[:1])))
    assert "question about Python's topic 'for': What is it about? (1,200 tokens in, 9 out)" in text
    assert "answer: It is about [loops]" in text


def test_a_report_without_figures_can_still_be_shown() -> None:
    empty = make_report(traffic=TrafficReport(), rows=[], samples=[])
    assert "0 / 0 / 0" in shown(empty)


def test_the_saved_report_can_be_read_back(tmp_path: Any) -> None:
    report = make_report()
    demo_report.save(report, tmp_path / "report.json")
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report
