"""Desired and effective configuration; trials end automatically, with value and limit reported."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.core.harness import LiveEngine, make_engine
from vtoken.control.controller import Controller
from vtoken.core.runtime.canary import Check
from vtoken.wire import (
    GUARD_COUNT,
    GUARD_SECONDS,
    ConfigDocument,
    Event,
    PatchResult,
    Problem,
    Slo,
)

Make = Callable[..., "Bench"]

P95 = "latency_seconds{kind=inter_token,quantile=0.95}"
AGREEMENT = "canary_agreement{group=evicting}"
LOST = "canary_logprob_lost{group=evicting}"


def above(metric: str, limit: float, **more: Any) -> dict[str, Any]:
    return {"metric": metric, "above": limit, **more}


def below(metric: str, limit: float, **more: Any) -> dict[str, Any]:
    return {"metric": metric, "below": limit, **more}


class Bench:
    """An engine at rest whose clock is the test's."""

    def __init__(self, **options: Any) -> None:
        self.engine: LiveEngine = make_engine(**{"num_blocks": 32, "prompt_tokens": 96} | options)
        self.now = 0.0
        self.engine.controller = Controller(self.engine.reporter, "", lambda: self.now)
        self.runtime = self.engine.core.runtime

    def decode(self, num_gaps: int, gap_ms: float) -> None:
        """One request receives tokens with this inter-token time."""
        for _ in range(num_gaps):
            self.now += gap_ms / 1e3
            self.runtime.latency.tokens(["a"], self.now)

    def patch(self, changes: dict[str, Any], **terms: Any) -> PatchResult:
        out: PatchResult = self.engine.call("patch_config", actor="ann", patch=changes, **terms)
        return out

    def refused(self, op: str, **args: Any) -> Problem:
        before = (self.runtime.config, self.runtime.revision, self.runtime.events.last_seq)
        reply = self.engine.ask(op, **args)
        assert reply.problem is not None
        after = (self.runtime.config, self.runtime.revision, self.runtime.events.last_seq)
        assert after == before
        return reply.problem

    @property
    def config(self) -> ConfigDocument:
        out: ConfigDocument = self.engine.call("config")
        return out

    @property
    def events(self) -> list[Event]:
        page = self.engine.call("events", limit=10_000)
        return [event for event in page.events if event.kind == "config"]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def new(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield new
    for bench in made:
        bench.engine.close()


@pytest.fixture
def bench(make: Make) -> Bench:
    """An engine with running requests that steps only when the test steps it."""
    bench = make()
    bench.engine.steps(3)
    return bench


# ---------------------------------------------------------------- desired and effective


def test_effective_is_what_the_newest_step_ran_with_until_another_step_runs(bench: Bench) -> None:
    bench.patch({"theta_f": 0.5})
    config = bench.config
    assert (config.revision, config.effective_revision) == (2, 1)
    assert (config.desired.theta_f, config.effective.theta_f) == (0.5, 0.25)
    bench.engine.steps()
    config = bench.config
    assert (config.revision, config.effective_revision) == (2, 2)
    assert config.effective == config.desired


def test_effective_in_a_reply_never_has_values_that_no_step_ran_with(bench: Bench) -> None:
    first = bench.patch({"theta_f": 0.5})
    assert (first.outcome, first.overtaken) == ("accepted", None)
    assert first.desired is not None
    assert (first.desired.theta_f, first.effective.theta_f) == (0.5, 0.25)
    assert (first.revision, first.effective_revision) == (2, 1)
    second = bench.patch({"theta_f": 0.75})
    assert (second.outcome, second.overtaken) == ("accepted", 2)
    assert (second.effective.theta_f, second.effective_revision) == (0.25, 1)
    same = bench.patch({"theta_f": 0.75})
    assert (same.outcome, same.revision, same.effective_revision) == ("unchanged", 3, 1)
    assert second.applied_at_step == bench.runtime.step + 1
    bench.engine.steps()
    assert bench.patch({"theta_f": 0.75}).effective == second.desired
    undone = bench.engine.call("undo")
    assert (undone.outcome, undone.desired.theta_f, undone.effective.theta_f) == (
        "accepted",
        0.5,
        0.75,
    )


def test_dry_runs_of_undo_and_confirm_change_nothing(bench: Bench) -> None:
    for op, title in (("undo", "Nothing to undo"), ("confirm", "Nothing on trial")):
        assert bench.refused(op, validate_only=True).title == title
    bench.patch({"theta_f": 0.5})
    bench.patch({"recycle": False}, confirm_within_s=60)
    before, seq = bench.config, bench.runtime.events.last_seq
    for _ in range(2):  # nothing was consumed by the first
        undone = bench.engine.call("undo", if_match=3, validate_only=True)
        assert (undone.outcome, undone.revision, undone.applied_at_step) == ("dry_run", 3, None)
        assert undone.changes == {"recycle": [False, True]}
        assert undone.desired == undone.previous == before.desired
        assert undone.effective == before.effective
        assert undone.what_if is not None
        assert "it ends the trial of revision 3" in undone.notes
        kept = bench.engine.call("confirm", validate_only=True)
        assert (kept.outcome, kept.changes) == ("dry_run", {})
        assert kept.notes == ["revision 3 would be confirmed and stay"]
    assert bench.refused("undo", if_match=1, validate_only=True).status == 412
    assert (bench.config, bench.runtime.events.last_seq) == (before, seq)
    assert bench.engine.call("undo").desired.theta_f == 0.5


def test_a_change_of_an_idle_engine_is_effective_at_once(make: Make) -> None:
    bench = make(concurrency=0)
    bench.patch({"theta_f": 0.5})
    second = bench.patch({"theta_f": 0.75})
    assert (bench.config.effective_revision, bench.config.effective.theta_f) == (3, 0.75)
    assert second.notes == []
    assert (second.outcome, second.overtaken) == ("in_force", None)
    assert (second.effective, second.effective_revision) == (second.desired, 3)


def test_the_stream_shows_a_change_when_a_step_ran_with_it(bench: Bench) -> None:
    bench.patch({"theta_f": 0.5})
    assert bench.engine.call("frame").config.effective_revision == 1
    bench.engine.steps()
    assert bench.engine.call("frame").config.effective_revision == 2


def test_a_revision_that_no_step_ran_with_is_reported_as_superseded(bench: Bench) -> None:
    first = bench.patch({"theta_f": 0.5})
    second = bench.patch({"theta_f": 0.75})
    assert first.notes == []
    assert second.notes == ["revision 2 is superseded: no step has run with it"]
    assert "overtaken" not in bench.events[0].data
    assert bench.events[1].data["overtaken"] == 2
    bench.engine.steps()
    bench.patch({"theta_f": 0.1})
    assert "overtaken" not in bench.events[2].data


@pytest.mark.parametrize(
    ("before", "change", "note"),
    [
        (
            {"reclamation": "paused"},
            {"theta_f": 0.5, "low_watermark_blocks": 3},
            "theta_f and low_watermark_blocks: no effect: reclamation is paused",
        ),
        ({"reclamation": "paused"}, {"theta_f": 0.5, "reclamation": "auto"}, None),
        ({"reclamation": "paused"}, {"batch_size": 5}, None),
        (
            {"policy": {"name": "none"}, "budget_ratio": 0.0},
            {"budget_tokens": 40},
            "budget_tokens: only for requests with a policy of their own, while policy is none",
        ),
        ({"budget_ratio": 0.0}, {"budget_tokens": 40}, None),
        (
            {"budget_ratio": 0.5},
            {"budget_tokens": 40},
            "budget_tokens: no effect: budget_ratio 0.5 decides the floor",
        ),
        (
            {"evict_when": "always"},
            {"evict_after_wait_ms": 500},
            "evict_after_wait_ms: only for requests with vtoken_evict_when=pressure, while "
            "evict_when is always",
        ),
        ({}, {"evict_after_wait_ms": 500}, None),
        (
            {"policy": {"name": "none"}, "evict_when": "always"},
            {"evict_when": "pressure"},
            "evict_when: only for requests with a policy of their own, while policy is none",
        ),
        (
            {"evict_when": "always"},
            {"evict_when": "pressure"},
            "pressure: running requests lose nothing more until a block is short; what they lost "
            "comes back if it is parked",
        ),
        (
            {},
            {"evict_when": "always"},
            "always: running requests beyond their budget and interval lose tokens from the next "
            "step on, whether a block is short or not",
        ),
        (
            {},
            {"reclamation": "off"},
            "pressure: while reclamation is off, nobody gives tokens, and a request that "
            "grows may preempt another",
        ),
        ({"evict_when": "always"}, {"reclamation": "off"}, None),
    ],
)
def test_a_note_names_values_without_effect_and_what_a_mode_means(
    bench: Bench, before: dict[str, Any], change: dict[str, Any], note: str | None
) -> None:
    bench.patch(before)
    bench.engine.steps()
    notes = [] if note is None else [note]
    assert bench.patch(change, validate_only=True).notes == notes
    assert bench.patch(change).notes == notes
    assert bench.events[-1].data["notes"] == notes


def test_a_dry_run_says_if_no_running_request_is_above_a_floor(bench: Bench) -> None:
    bench.patch({"budget_ratio": 0.0})
    bench.engine.steps(3)
    note = "no running request can give: none has a block above this floor"
    longest = max(table.num_live for table in bench.runtime.tables)
    assert bench.patch({"budget_tokens": longest}, validate_only=True).notes == [note]
    assert bench.patch({"budget_tokens": longest // 2}, validate_only=True).notes == []
    fixed = {"budget_tokens": longest, "evict_when": "always"}
    assert note not in bench.patch(fixed, validate_only=True).notes


# ---------------------------------------------------------------- unless confirmed


def test_the_engine_reverts_an_unconfirmed_change_at_its_deadline(
    bench: Bench,
) -> None:
    result = bench.patch({"theta_f": 0.5, "recycle": False}, confirm_within_s=60)
    trial = result.trial
    assert trial is not None
    assert bench.config.trial == trial
    assert (trial.revision, trial.actor, trial.changes) == (2, "ann", result.changes)
    assert trial.expires_ts == pytest.approx(trial.started_ts + 60)
    assert bench.events[-1].data["trial"]["revision"] == 2
    assert "confirm within 60 s" in bench.events[-1].summary
    bench.now = 59.9
    bench.engine.steps()
    assert bench.config.effective.theta_f == 0.5
    bench.now = 60.0
    bench.engine.steps()
    config = bench.config
    assert (config.revision, config.effective_revision, config.trial) == (3, 3, None)
    assert (config.effective.theta_f, config.effective.recycle) == (0.25, True)
    event = bench.events[-1]
    assert event.summary.startswith("reverted: not confirmed within 60 s; theta_f 0.5 -> 0.25")
    assert (event.data["actor"], event.data["reverted"]) == ("trial", 2)
    assert event.data["changes"] == {"theta_f": [0.5, 0.25], "recycle": [False, True]}
    assert bench.refused("undo").status == 409  # nothing is left to undo


def test_an_idle_engine_reverts_at_the_next_command(make: Make) -> None:
    bench = make(concurrency=0)
    bench.patch({"theta_f": 0.5}, confirm_within_s=10)
    bench.now = 500.0
    assert bench.engine.call("status").config_revision == 3
    assert bench.runtime.config.theta_f == 0.25


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_jump_of_the_wall_clock_does_not_change_the_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    bench.patch({"theta_f": 0.5}, confirm_within_s=60)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    bench.now = 59.0
    assert bench.config.revision == 2
    bench.now = 61.0
    assert bench.config.revision == 3


def test_a_confirmed_change_stays(bench: Bench) -> None:
    bench.patch({"theta_f": 0.5}, confirm_within_s=60, guards=[above("preemptions", 0)])
    result = bench.engine.call("confirm", actor="bob", if_match=2)
    assert (result.revision, result.changes, result.trial) == (2, {}, None)
    assert bench.events[-1].summary == "rev 2 confirmed by bob"
    assert bench.events[-1].data["confirmed"] == 2
    bench.now = 1e6
    bench.runtime.counters.requests.preempted += 9
    bench.engine.steps()
    assert (bench.config.revision, bench.config.trial) == (2, None)
    assert bench.engine.call("undo").desired.theta_f == 0.25


def test_confirming_is_refused_when_nothing_is_on_trial_or_another_revision(bench: Bench) -> None:
    assert bench.refused("confirm").status == 409
    bench.patch({"theta_f": 0.5}, confirm_within_s=60)
    assert bench.refused("confirm", if_match=1).status == 412
    bench.now = 60.0
    assert bench.config.revision == 3
    assert bench.refused("confirm").title == "Nothing on trial"


def test_while_a_change_is_on_trial_another_one_is_refused_and_undo_ends_it(bench: Bench) -> None:
    bench.patch({"recycle": False})
    bench.patch({"theta_f": 0.5}, guards=[above("preemptions", 3)])
    for terms in ({}, {"confirm_within_s": 5}):
        problem = bench.refused("patch_config", patch={"theta_f": 0.1}, **terms)
        assert (problem.status, problem.value) == (409, 3)
        assert "confirm keeps it, undo takes it back" in problem.detail
    assert bench.engine.call("undo").desired.theta_f == 0.25
    assert (bench.config.trial, bench.config.desired.recycle) == (None, False)
    assert "ends the trial of rev 3" in bench.events[-1].summary
    bench.now = 1e6
    assert bench.config.revision == 4
    assert bench.patch({"theta_f": 0.1}).revision == 5


# ---------------------------------------------------------------- guards


def test_a_guard_on_latency_reverts_once_it_has_enough_intervals(bench: Bench) -> None:
    bench.decode(50, 500)  # before the change: not evaluated
    (note,) = bench.patch({"theta_f": 0.5}, guards=[above(P95, 0.04)]).notes
    assert re.fullmatch(
        r"p95 inter-token is \d+ ms before the change, above the guard of 40 ms", note
    )
    bench.decode(GUARD_COUNT - 1, 62)
    assert bench.config.trial is not None
    bench.decode(1, 62)
    assert bench.config.trial is None
    summary = bench.events[-1].summary
    words = (
        r"reverted: p95 inter-token 6\d(\.\d)? ms > 40 ms over 20 tokens; "
        r"theta_f 0.5 -> 0.25 by guard \(rev 3\)"
    )
    assert re.fullmatch(words, summary), summary


def test_a_guard_on_goodput_reverts_once_enough_requests_missed_the_slo(bench: Bench) -> None:
    def ends(after_ms: float, num: int) -> None:
        for _ in range(num):
            bench.runtime.latency.arrived("a", bench.now)
            bench.now += after_ms / 1e3
            bench.runtime.latency.discard("a", 1, bench.now)
            bench.runtime.latency.tokens(["a"], bench.now)

    changed = bench.patch({"slo": " ttft < 50ms"}).changes
    assert changed == {"slo": ["", "ttft<50ms"]}
    assert bench.engine.call("status").slo == Slo(text="ttft<50ms", window_s=60.0)
    bench.engine.steps()
    guard = below("goodput", 0.8, min_count=10)
    bench.patch({"theta_f": 0.5}, guards=[guard])
    ends(40, 4)
    ends(60, 5)
    (seen,) = bench.engine.call("status").guards
    assert (seen.metric, seen.count, seen.value) == ("goodput_ratio", 9, pytest.approx(4 / 9))
    assert bench.config.trial is not None
    ends(40, 1)
    assert bench.config.trial is None
    assert "reverted: goodput 0.5 < 0.8 over 10 requests" in bench.events[-1].summary


def test_a_guard_on_latency_uses_the_newest_minute_and_allows_one_outlier_in_twenty(
    bench: Bench,
) -> None:
    bench.patch({"theta_f": 0.5}, guards=[above(P95, 0.04)])
    bench.decode(1900, 20)
    bench.decode(90, 62)
    assert bench.config.trial is not None
    bench.decode(60, 62)
    assert bench.config.trial is None


def test_a_guard_that_holds_keeps_the_change_and_reports_its_values(bench: Bench) -> None:
    bench.patch({"theta_f": 0.5}, guards=[above(P95, 0.04), above("preemptions", 2)])
    bench.now = GUARD_SECONDS - 3.0
    bench.decode(100, 20)
    assert bench.config.trial is not None
    bench.now = float(GUARD_SECONDS)
    config = bench.config
    assert (config.revision, config.trial, config.desired.theta_f) == (2, None, 0.5)
    event = bench.events[-1]
    assert (event.data["kept"], event.data["changes"]) == (2, {})
    words = (
        r"its guard held for 300 s: p95 inter-token \d+(\.\d)? ms <= 40 ms over 99 tokens, "
        r"preemptions 0 <= 2"
    )
    assert re.fullmatch(words, event.data["reason"]), event.data["reason"]


def test_an_expiring_guard_is_evaluated_once_more(bench: Bench) -> None:
    bench.patch({"theta_f": 0.5}, guard_for_s=10, guards=[above("preemptions", 0)])
    bench.runtime.counters.requests.preempted += 1
    bench.now = 11.0
    assert bench.config.desired.theta_f == 0.25


def test_a_guard_shorter_than_the_deadline_ends_alone(bench: Bench) -> None:
    bench.patch(
        {"theta_f": 0.5}, guard_for_s=10, confirm_within_s=60, guards=[above("preemptions", 0)]
    )
    bench.now = 11.0
    assert bench.config.trial is not None
    bench.runtime.counters.requests.preempted += 5
    bench.engine.steps()
    assert bench.config.desired.theta_f == 0.5
    bench.now = 60.0
    assert bench.config.desired.theta_f == 0.25
    assert bench.events[-1].data["actor"] == "trial"


# ---------------------------------------------------------------- bad terms, tried terms


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        *[({"confirm_within_s": v}, "confirm_within_s") for v in (0, -1, 86_401, 1.5, True, "9")],
        *[
            ({"guards": [above("preemptions", 1)], "guard_for_s": v}, "guard_for_s")
            for v in (0, 86_401, 1.0)
        ],
        ({"guard_for_s": 60}, "guard_for_s"),
        ({"guard_for_s": 60, "confirm_within_s": 60}, "guard_for_s"),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_bad_terms_are_refused_by_name_and_change_nothing(
    bench: Bench, terms: dict[str, Any], field: str, validate_only: bool
) -> None:
    problem = bench.refused(
        "patch_config", patch={"theta_f": 0.5}, validate_only=validate_only, **terms
    )
    assert (problem.status, problem.field) == (422, field)
    assert problem.bound


def test_a_dry_run_checks_the_terms_and_puts_nothing_on_trial(bench: Bench) -> None:
    result = bench.patch({"theta_f": 0.5}, validate_only=True, confirm_within_s=5)
    assert (result.trial, result.revision, bench.config.trial) == (None, 1, None)
    bench.patch({"theta_f": 0.5}, confirm_within_s=5)
    tried = bench.patch({"theta_f": 0.1}, validate_only=True)
    assert tried.what_if is not None
    assert tried.notes[-1] == "refused while revision 2 is on trial: confirm or undo it first"


def test_a_change_that_changes_nothing_is_not_on_trial(bench: Bench) -> None:
    result = bench.patch({"theta_f": 0.25}, confirm_within_s=5)
    assert (result.trial, result.revision) == (None, 1)
    assert result.notes == ["nothing changes, so nothing is on trial"]


# ---------------------------------------------------------------- the quality canary


def check_all(bench: Bench, num: int, agreed: int, lost: float = 0.0, revision: int = 2) -> None:
    """`num` requests of ten tokens were checked."""
    for _ in range(num):
        bench.runtime.canary.add(Check("h2o", revision, 10, agreed, lost, -5.0), evicted=True)


ON = {"canary": {"share": 0.5}}


def test_a_change_is_reverted_when_agreement_falls_below_its_guard(bench: Bench) -> None:
    check_all(bench, 40, 0, revision=1)  # before the change
    bench.patch(ON, guards=[below(AGREEMENT, 0.9)])
    check_all(bench, GUARD_COUNT - 1, 8)
    bench.engine.steps()
    assert bench.config.trial is not None
    check_all(bench, 1, 8)
    bench.engine.steps()
    assert bench.config.trial is None
    assert bench.config.desired.canary.share == 0.0
    event = bench.events[-1]
    assert (event.data["actor"], event.data["reverted"]) == ("guard", 2)
    assert event.data["reason"] == "agreement 0.8 ± 0 < 0.9 over 20 canaries"


def test_a_change_is_reverted_when_it_loses_more_than_its_guard(
    bench: Bench,
) -> None:
    bench.patch(ON, guards=[above(LOST, 0.1, min_count=3)])
    check_all(bench, 2, 10, lost=1.5)
    check_all(bench, 1, 10, lost=0.75)
    bench.engine.steps()
    reason = bench.events[-1].data["reason"]
    assert reason == "log-probability lost 0.125 ± 0.025 > 0.1 over 3 canaries"


def test_a_guard_that_held_reports_the_canarys_means(bench: Bench) -> None:
    bench.patch(ON, guard_for_s=10, guards=[below(AGREEMENT, 0.9), above(LOST, 1.0)])
    check_all(bench, 19, 0, lost=5.0)
    bench.now += 11
    bench.engine.steps()
    assert bench.events[-1].data["reason"] == (
        "its guard was never evaluated in 10 s: agreement not evaluated, 19 of 20 canaries, "
        "log-probability lost not evaluated, 19 of 20 canaries"
    )
    assert bench.events[-1].data["unevaluated"] == ["agreement", "log-probability lost"]
    bench.patch({"theta_f": 0.5}, guard_for_s=10, guards=[below(AGREEMENT, 0.9)])
    check_all(bench, 20, 9, revision=3)
    bench.now += 11
    bench.engine.steps()
    reason = bench.events[-1].data["reason"]
    assert reason == "its guard held for 10 s: agreement 0.9 ± 0 >= 0.9 over 20 canaries"
    assert bench.events[-1].data["unevaluated"] == []


def test_a_guard_without_evidence_for_one_of_its_limits_says_so(bench: Bench) -> None:
    bench.patch(ON, guard_for_s=10, guards=[below(AGREEMENT, 0.9), above("preemptions", 2)])
    bench.now += 11
    bench.engine.steps()
    event = bench.events[-1]
    assert event.data["unevaluated"] == ["agreement"]
    assert event.summary == (
        "rev 2 is kept: its guard was evaluated only in part in 10 s: agreement not evaluated, "
        "0 of 20 canaries, preemptions 0 <= 2"
    )


def test_a_guard_on_latency_that_had_evidence_once_was_evaluated(bench: Bench) -> None:
    bench.patch({"theta_f": 0.5}, guard_for_s=300, guards=[above(P95, 0.04)])
    bench.decode(GUARD_COUNT + 1, 20)
    assert bench.config.trial is not None
    bench.now += 300  # no token in the newest minute
    assert bench.config.trial is None
    event = bench.events[-1]
    assert event.data["unevaluated"] == []
    assert event.data["reason"].startswith("its guard held for 300 s: ")


@pytest.mark.parametrize("validate_only", [True, False])
def test_confirming_a_change_whose_guard_had_no_evidence_says_so(
    bench: Bench, validate_only: bool
) -> None:
    guards = [below(AGREEMENT, 0.9), above("preemptions", 2)]
    bench.patch(ON, guards=guards, guard_for_s=10, confirm_within_s=60)
    bench.now += 11
    result = bench.engine.call("confirm", validate_only=validate_only)
    assert result.notes[-1] == "its guard had no evidence for agreement"
    if not validate_only:
        assert bench.events[-1].data["notes"] == ["its guard had no evidence for agreement"]


@pytest.mark.parametrize(
    ("guard", "needs"),
    [
        (below(AGREEMENT, 0.5), "canary.share"),
        (above(LOST, 0.5), "canary.share"),
        (below("goodput_ratio", 0.5), "slo"),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_guard_on_what_is_not_measured_is_refused(
    bench: Bench, guard: dict[str, Any], needs: str, validate_only: bool
) -> None:
    terms = {"guards": [guard], "validate_only": validate_only}
    problem = bench.refused("patch_config", patch={"theta_f": 0.5}, **terms)
    assert (problem.field, problem.value) == ("guards", guard["metric"])
    assert problem.bound == f"once {needs} is set; the same change may set it"
