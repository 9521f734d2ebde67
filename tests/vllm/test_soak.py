"""A short soak, and a control: it detects wrong output."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.soak.oracle import Oracle
from tests.soak.phases import Phase, plan_phases
from tests.soak.run import run_phase
from tests.soak.tally import Tally, total
from tests.support import reference
from tests.support.reference import Change, Stretch

pytestmark = pytest.mark.vllm

ROUNDS = 1000


@pytest.fixture
def phases(demo_model: Path, tmp_path: Path) -> list[Phase]:
    planned = plan_phases(
        seconds=1, seed=5, model=str(demo_model), logs=str(tmp_path), only="tiny", phase_seconds=1
    )
    return [msgspec.structs.replace(phase, steps=ROUNDS) for phase in planned]


@pytest.mark.slow
def test_a_short_soak_has_no_violation_no_failure_and_no_wrong_output(
    phases: list[Phase],
) -> None:
    tallies = [run_phase(phase) for phase in phases]
    combined = total(tallies)
    assert combined.failures == []
    assert combined.ok
    assert combined.finished > 10
    assert combined.evictions > 100
    assert combined.relocations > 0
    assert combined.verified == combined.relocations
    assert combined.checks >= combined.steps
    assert combined.compared_tokens > 100
    for phase in phases:
        assert Path(phase.log).read_text().count('"do":"add"') > 5


def test_a_child_that_dies_is_a_failure_with_its_log(phases: list[Phase]) -> None:
    engine = msgspec.structs.replace(phases[0].engine, environment={"PYTHONHOME": "/nowhere"})
    phase = msgspec.structs.replace(phases[0], engine=engine)
    tally = run_phase(phase)
    assert not tally.ok
    assert ".err" in tally.failures[0]


def test_the_oracle_distinguishes_right_output_from_wrong(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, attn_implementation="eager").eval()
    prompt = reference.random_prompt(60, 3)
    found = reference.trace(model, prompt, 40, reference.streaming_llm(4, 32, 6))
    evictions = [Change(60 + step, sorted(victims)) for step, victims in found.victims.items()]
    assert len(evictions) > 3
    oracle = Oracle(demo_model)
    right = oracle.compare(prompt, found.tokens, [Stretch(60, evictions)])
    assert len(right.gaps) == 40
    assert right.num_worse_than(1e-3) == 0
    # Controls: victims that stay visible, that are another token, that die a step late.
    other = [Change(when, [victim + 1 for victim in ids]) for when, ids, _ in evictions]
    for wrong in ([], other):
        assert oracle.compare(prompt, found.tokens, [Stretch(60, wrong)]).num_worse_than(1e-3) > 3
    changed = [*found.tokens[:20], (found.tokens[20] + 1) % 90, *found.tokens[21:]]
    assert oracle.compare(prompt, changed, [Stretch(60, evictions)]).num_worse_than(1e-3) >= 1


def test_a_preempted_request_is_checked_admission_by_admission(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, attn_implementation="eager").eval()
    prompt, evict = reference.random_prompt(50, 4), reference.streaming_llm(4, 32, 6)
    first = reference.trace(model, prompt, 15, evict)
    second = reference.trace(model, prompt + first.tokens, 15, evict)
    stretches = [
        Stretch(known, [Change(known + step, sorted(ids)) for step, ids in trace.victims.items()])
        for known, trace in ((50, first), (65, second))
    ]
    output = first.tokens + second.tokens
    oracle = Oracle(demo_model)
    verdict = oracle.compare(prompt, output, stretches)
    assert len(verdict.gaps) == 30
    assert verdict.num_worse_than(1e-3) == 0
    as_one = [Stretch(50, stretches[0].changes + stretches[1].changes)]
    assert oracle.compare(prompt, output, as_one).num_worse_than(1e-3) > 0


def test_tallies_add_up_and_one_failure_spoils_all() -> None:
    combined = total([Tally(requests=2, largest_gap=0.5), Tally(requests=3, largest_gap=0.2)])
    assert (combined.requests, combined.largest_gap, combined.ok) == (5, 0.5, True)
    for bad in (Tally(failed=1), Tally(violations=1), Tally(wrong_tokens=1), Tally(failures=["x"])):
        assert not total([combined, bad]).ok
