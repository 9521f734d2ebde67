"""Streaming-input sessions next to requests that evict: turns over blocks that stay allocated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of
from tests.support.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

TURNS = [reference.random_prompt(length, seed) for seed, length in enumerate((100, 60, 30))]
OTHER = reference.random_prompt(90, 9)
NUM_NEW = 20
EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 64,
    "interval_tokens": 8,
    "recycle": False,
    "theta_f": 0.0,
    "low_watermark_blocks": 512,
}


def add(llm: Any, request_id: str, prompt: list[int], *, resumable: bool) -> None:
    """As vLLM's front end does for each piece of a session's input."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_NEW,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"vtoken_budget_tokens": 48},
    )
    request = llm.llm_engine.input_processor.process_inputs(
        request_id=request_id,
        prompt={"prompt_token_ids": list(prompt)},  # vLLM lets a session grow in place
        params=params,
        supported_tasks=("generate",),
        resumable=resumable,
    )
    core = llm.llm_engine.engine_core.engine_core
    core.add_request(*core.preprocess_add_request(request))


def step(llm: Any, tokens: dict[str, list[int]]) -> None:
    """Until nothing is left to compute."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_fn()
        for client in (outputs or {}).values():
            for output in client.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)


@pytest.fixture(scope="module")
def expected(hf_model: Any) -> list[int]:
    """A session's expected output: a turn removes the token that was sampled and never computed."""
    context: list[int] = []
    tokens: list[int] = []
    for turn in TURNS:
        context += turn
        answer = reference.generate(hf_model, context, NUM_NEW, reference.full)
        context += answer[:-1]
        tokens += answer
    return tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "steps overlap"])
def test_a_session_evicts_nothing_next_to_requests_that_do(
    overlap: bool, engine: Any, expected: list[int]
) -> None:
    tokens: dict[str, list[int]] = {}
    args = engine_args(EVICTING | {"verify_ratio": 1.0}, check_every_step=True)
    with async_scheduling() if overlap else nullcontext(), engine(**args) as llm:
        runtime = runtime_of(llm)
        for number, turn in enumerate(TURNS):
            add(llm, "session", turn, resumable=True)
            add(llm, f"beside {number}", OTHER, resumable=False)
            step(llm, tokens)
            assert [table.request_id for table in runtime.tables] == ["session"]
        add(llm, "session", [0], resumable=False)  # its input has ended
        step(llm, tokens)
        assert len(runtime.tables) == 0
        assert runtime.state.request_rules == {}
        assert runtime.counters.tokens.evicted > 0
        assert runtime.counters.invariants.violations == 0
        runtime.check()
    assert tokens["session"] == expected
