"""Guards on any series of the metrics table: what is accepted, what a value is, what reverts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.core.harness import LiveEngine, make_engine
from tests.support.core.live import make_pressed
from vtoken import wire
from vtoken.base.errors import RefusedError
from vtoken.control.guard_watch import RATE_WINDOW_S, Rate
from vtoken.core.runtime.canary import Check
from vtoken.core.runtime.losses import kept_share
from vtoken.wire import GUARD_COUNT, Guard, Trial
from vtoken.wire.guards import checked, guard_text, held_text, offered, parse_guard, series_of
from vtoken.wire.metrics import METRICS

AGREEMENT = "canary_agreement{group=evicting}"
P95 = "latency_seconds{kind=inter_token,quantile=0.95}"
CANARY = {"canary": {"share": 1.0}}


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    """An engine whose requests evict all the time."""
    with make_engine(config={"policy": {"name": "streaming_llm"}, **EVICTS}) as live:
        live.steps(3)
        yield live


EVICTS = {"budget_tokens": 64, "interval_tokens": 8, "evict_when": "always"}


def trial_of(engine: LiveEngine) -> Trial | None:
    found: Trial | None = engine.call("config").trial
    return found


def reason_of(engine: LiveEngine) -> str:
    events = engine.call("events", limit=10_000).events
    return str([e.data["reason"] for e in events if e.kind == "config" and "reason" in e.data][-1])


# ---------------------------------------------------------------- what is accepted


def test_every_series_that_is_offered_is_found_under_its_name() -> None:
    names = [str(series) for series in offered()]
    assert len(set(names)) == len(names)
    for series in offered():
        found = series_of(str(series))
        assert (found.metric, found.labels) == (series.metric, series.labels)
    quoted = series_of('latency_seconds{kind="inter_token", quantile="0.95"}')
    assert str(quoted) == P95


def test_the_labels_of_the_table_are_those_that_an_engine_reports() -> None:
    live = make_pressed()
    live.steps(60)
    live.runtime.canary.add(Check("h2o", 1, 10, 9, 0.5, -5.0), evicted=True)
    live.configure(canary={"share": 1.0})
    status = live.reporter.status()
    live.close()
    num_series = 0
    for metric in METRICS:
        for labels, _ in metric.read(status):
            num_series += 1
            for value, known in zip(labels, metric.labels.values(), strict=True):
                assert value in known, metric.name
    assert num_series > len(METRICS)


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (Guard(metric="nothing", above=1), "one of blocks, low_utilization_blocks, "),
        (Guard(metric="theta_f", above=1), "'theta_f' is no metric that a guard may be on"),
        (Guard(metric="kept_share", below=1), "'kept_share' is no metric"),
        (Guard(metric="server_recording", above=1), "'server_recording' is no metric"),
        (Guard(metric="rate(f)", above=1), r"no counter that a guard may be on; one of rate\("),
        (Guard(metric="blocks", below=1), r"one of blocks\{state=free\}, blocks\{state=partial"),
        (Guard(metric="blocks{state=gone}", below=1), "no series of blocks"),
        (Guard(metric="f{state=free}", above=1), "no series of f; one of f"),
        (Guard(metric="f"), "needs one limit; either above or below"),
        (Guard(metric="f", above=1, below=0), "needs one limit"),
        (Guard(metric="f", above=float("nan")), "needs one limit"),
        (Guard(metric="preemptions", below=1), r"below, on rate\(preemptions\)"),
        (Guard(metric="preemptions", above=1, min_count=5), "rests on no samples"),
        (Guard(metric=AGREEMENT, below=1, min_count=0), r"min_count = 0; 1\.\.200"),
        (Guard(metric=AGREEMENT, below=1, min_count=201), r"1\.\.200"),
    ],
)
def test_a_guard_that_makes_no_sense_is_refused_with_what_is_possible(
    guard: Guard, words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as refused:
        checked([guard])
    assert (refused.value.field, refused.value.status) == ("guards", 422)


def test_seventeen_guards_are_too_many() -> None:
    with pytest.raises(RefusedError, match="at most 16"):
        checked([Guard(metric="f", above=1)] * 17)


@pytest.mark.parametrize(
    ("text", "guard", "shown"),
    [
        ("preemptions>2", Guard(metric="preemptions", above=2), "preemptions > 2"),
        (
            f"{AGREEMENT} < 0.9 over 30",
            Guard(metric=AGREEMENT, below=0.9, min_count=30),
            "agreement < 0.9 over 30 canaries or more",
        ),
        (f"{P95}>4e-2", Guard(metric=P95, above=0.04), "p95 inter-token > 40 ms"),
        (
            "rate(generated_tokens)<100",
            Guard(metric="rate(generated_tokens)", below=100),
            "rate(generated_tokens) < 100",
        ),
    ],
)
def test_a_guard_is_written_as_a_comparison(text: str, guard: Guard, shown: str) -> None:
    assert parse_guard(text) == guard
    assert guard_text(guard) == shown


@pytest.mark.parametrize(
    ("metric", "value", "shown"),
    [
        (P95, 0.0123456, "12.3 ms"),
        (P95, 1.59123, "1.59 s"),
        ("moved_bytes", 123_456_789_012, "123456789012"),
        ("f", 0.31237, "0.312"),
        ("rate(moved_bytes)", 12_345.6, "12346"),
    ],
)
def test_a_value_is_shown_in_its_unit_without_an_exponent(
    metric: str, value: float, shown: str
) -> None:
    assert series_of(metric).shown(value) == shown


@pytest.mark.parametrize("text", ["", "f", "f>", "f>x", ">1", "f>nan", "f>1<2", "f>1 over x"])
def test_a_text_that_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not METRIC>NUMBER"):
        parse_guard(text)


def test_a_guard_of_a_newer_engine_is_shown_with_the_name_that_it_has() -> None:
    guard = Guard(metric="new_thing{a=b}", below=3, min_count=7, value=5.0, count=2)
    assert guard_text(guard) == "new_thing{a=b} < 3 over 7 samples or more"
    assert held_text(guard) == "new_thing{a=b} >= 3 (now 5), 2 of 7 samples"


# ---------------------------------------------------------------- what a value is


def test_a_guard_on_a_gauge_waits_for_a_step_with_the_change(engine: LiveEngine) -> None:
    used = engine.reporter.status().blocks.used
    assert used > 0
    metric = "tokens{state=live}"
    guards = [{"metric": metric, "above": 0}]
    result = engine.call("patch_config", patch={"theta_f": 0.5}, guards=guards)
    live = engine.reporter.status().tokens.live
    assert result.notes == [f"{metric} is {live} before the change, above the guard of 0"]
    assert trial_of(engine) is not None
    engine.steps(2)
    assert trial_of(engine) is None
    assert reason_of(engine).startswith(f"{metric} ")
    assert engine.runtime.config.theta_f == 0.25


def test_a_guard_on_a_counter_counts_from_the_change_on(engine: LiveEngine) -> None:
    engine.steps(20)
    before = engine.runtime.counters.tokens.evicted
    assert before > 40
    guards = [{"metric": "evicted_tokens", "above": 40}]
    engine.call("patch_config", patch={"theta_f": 0.5}, guards=guards)
    while trial_of(engine) is not None:
        assert engine.runtime.counters.tokens.evicted - before <= 40
        engine.steps()
    since = engine.runtime.counters.tokens.evicted - before
    assert since > 40
    assert reason_of(engine) == f"evicted_tokens {since} > 40"


def test_the_status_has_the_guards_with_their_values_and_samples(engine: LiveEngine) -> None:
    assert engine.call("status").guards == []
    guards = [
        {"metric": "generated_tokens", "above": 10_000},
        {"metric": AGREEMENT, "below": 0.5},
        {"metric": "rate(generated_tokens)", "below": 0},
    ]
    engine.call("patch_config", patch=CANARY, guards=guards)
    engine.runtime.canary.add(Check("h2o", 2, 10, 9, 0.5, -5.0), evicted=True)
    before = engine.runtime.counters.tokens.generated
    engine.steps(3)
    generated, agreement, rate = engine.call("status").guards
    assert generated.value == engine.runtime.counters.tokens.generated - before > 0
    assert (generated.count, generated.min_count) == (None, None)
    assert (agreement.value, agreement.count, agreement.min_count) == (0.9, 1, GUARD_COUNT)
    assert held_text(agreement) == "agreement >= 0.5 (now 0.9), 1 of 20 canaries"
    assert (rate.count, rate.min_count) == (0, GUARD_COUNT)
    assert engine.call("frame").status.guards[1] == agreement


def test_a_rate_is_of_the_newest_minute_and_rests_on_its_seconds() -> None:
    rate = Rate()
    assert rate.over(100.0, 50.0) == (None, 0)
    for second in range(1, 200):
        value, seconds = rate.over(100.0 + second, 50.0 + 3 * second)
        assert value == pytest.approx(3.0)
        assert seconds == min(second, RATE_WINDOW_S)
    for second in range(200, 260):
        value, seconds = rate.over(100.0 + second, 50.0 + 3 * 199)
    assert value == pytest.approx(0.0)


def test_a_rate_leaves_out_the_time_of_pauses(engine: LiveEngine) -> None:
    scheduling = engine.reporter.scheduling
    assert scheduling.running_s(10.0) == 10.0
    scheduling.changed("paused", 12.0)
    assert scheduling.running_s(20.0) == 12.0
    scheduling.changed("running", 30.0)
    assert scheduling.running_s(31.0) == 13.0
    scheduling.changed("paused_new", 40.0)
    assert scheduling.running_s(41.0) == 23.0


# ---------------------------------------------------------------- a change of `evict_when`


class Checked:
    """Checks finished requests as a canary would whose outputs suffer from what was evicted.

    A request agrees on the share of tokens that it kept.
    """

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self._before = {row.id for row in engine.reporter.rows()}
        self._known: set[str] = set()

    def step(self) -> None:
        self._engine.steps()
        runtime = self._engine.runtime
        for request_id in runtime.finished.ids():
            ended = runtime.finished.get(request_id)
            if ended is None or request_id in self._known:
                continue
            self._known.add(request_id)
            if request_id not in self._before:
                agreed = round(100 * kept_share(ended))
                check = Check(ended.policy, runtime.revision, 100, agreed, 0.0, -50.0)
                runtime.canary.add(check, evicted=ended.dead > 0)


@pytest.fixture
def spared() -> Iterator[LiveEngine]:
    """An engine with ample memory whose requests would evict under `always` alone."""
    with make_engine(
        num_blocks=256,
        config={
            "policy": {"name": "streaming_llm"},
            "budget_tokens": 64,
            "interval_tokens": 8,
            "evict_when": "pressure",
            **CANARY,
        },
        max_tokens=64,
    ) as live:
        live.steps(90)
        assert live.runtime.counters.tokens.evicted == 0
        assert live.runtime.counters.requests.finished > 0
        yield live


def test_evicting_always_is_reverted_live_when_agreement_falls_below_its_guard(
    spared: LiveEngine,
) -> None:
    guards = [{"metric": AGREEMENT, "below": 0.9, "min_count": 3}]
    spared.call("patch_config", patch={"evict_when": "always"}, guards=guards, guard_for_s=600)
    tally = Checked(spared)
    for _ in range(400):
        tally.step()
        if trial_of(spared) is None:
            break
    assert spared.runtime.config.evict_when == "pressure"
    assert spared.runtime.counters.tokens.evicted > 0
    assert re.fullmatch(r"agreement 0\.\d+ ± \S+ < 0\.9 over \d canaries", reason_of(spared))
    events = spared.call("events", limit=10_000).events
    (revert,) = [e for e in events if e.kind == "config" and "reverted" in e.data]
    assert (revert.data["actor"], revert.data["changes"]) == (
        "guard",
        {"evict_when": ["always", "pressure"]},
    )
    spared.steps(100)  # those that began under `always` end
    evicted = spared.runtime.counters.tokens.evicted
    spared.steps(100)
    assert spared.runtime.counters.tokens.evicted == evicted


def test_control_the_same_guard_keeps_a_change_that_evicts_nothing(spared: LiveEngine) -> None:
    guards = [{"metric": AGREEMENT, "below": 0.9, "min_count": 3}]
    spared.call("patch_config", patch={"theta_f": 0.5}, guards=guards, guard_for_s=600)
    tally = Checked(spared)
    for _ in range(400):
        tally.step()
    assert trial_of(spared) is not None
    assert spared.runtime.canary.document(2).control.count >= 3
    (guard,) = spared.call("status").guards
    assert (guard.value, guard.count) == (None, 0)


def test_guards_are_part_of_a_trials_event(engine: LiveEngine) -> None:
    guards = [{"metric": "f", "above": 2}]
    engine.call("patch_config", patch={"theta_f": 0.5}, guards=guards)
    (event,) = [e for e in engine.call("events", limit=100).events if e.kind == "config"]
    assert event.summary.endswith("on trial: reverted if f > 2")
    trial = msgspec.convert(event.data["trial"], wire.Trial)
    assert trial.guards == [Guard(metric="f", above=2)]
