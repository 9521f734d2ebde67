"""A violation in strict mode stops the engine before a token of that step leaves; in lenient mode
the engine continues and counts. What clients of a server see is in `test_server.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.broken_worker import Breakable
from tests.faults.engine import CONFIG, ENGINE_ARGUMENTS
from tests.soak.oracle import Oracle
from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of, scheduler_of
from tests.support.stepping import Outputs, add, step
from vtoken.base.errors import InvariantViolation

pytestmark = pytest.mark.vllm

PROMPTS = [reference.random_prompt(90 + 10 * i, i) for i in range(3)]
NUM_NEW = 60


def run(llm: Any, tokens: Outputs) -> None:
    """Step until all requests finish, with a worker whose copies are wrong."""
    llm.collective_rpc(Breakable.lose_the_last_layer)
    for number, prompt in enumerate(PROMPTS):
        add(llm, str(number), prompt, NUM_NEW)
    step(llm, tokens)


def test_strict_no_token_of_a_violated_step_leaves_the_engine(
    engine: Any, demo_model: Path
) -> None:
    from tests.support.live_sets import LiveSets

    tokens: Outputs = {}
    with engine(**ENGINE_ARGUMENTS, **engine_args(CONFIG, strict=True)) as llm:
        watch = LiveSets(scheduler_of(llm))
        with pytest.raises(InvariantViolation, match=r"I1: relocation of .* in layer 3"):
            run(llm, tokens)
        counters = runtime_of(llm).counters
        assert counters.invariants.violations == 1
        (event,) = [
            e for e in runtime_of(llm).events.page(0, 10_000).events if e.kind == "violation"
        ]
        assert event.data["invariant"] == "I1"
    assert all(0 < len(sampled) < NUM_NEW for sampled in tokens.values())
    oracle = Oracle(demo_model)
    for number, sampled in tokens.items():
        stretches = watch.stretches[number]
        verdict = oracle.compare(PROMPTS[int(number)], sampled, stretches)
        assert len(verdict.gaps) == len(sampled)
        assert verdict.num_worse_than(1e-3) == 0


def test_lenient_the_engine_continues_and_reports_the_violation(engine: Any) -> None:
    tokens: Outputs = {}
    with engine(**ENGINE_ARGUMENTS, **engine_args(CONFIG, strict=False)) as llm:
        run(llm, tokens)
        scheduler = scheduler_of(llm)
        invariants = scheduler.vtoken_controller.reporter.status().invariants
        assert invariants.violations > 0
        assert not invariants.strict
        assert invariants.verified_relocations >= invariants.violations
        assert invariants.verify_us > 0
    assert [len(sampled) for sampled in tokens.values()] == [NUM_NEW] * len(PROMPTS)
