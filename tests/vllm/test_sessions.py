"""Streaming-input sessions next to requests that evict: turns over blocks that stay allocated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of, scheduler_of
from tests.support.waiting import LIMIT_S
from tests.vllm.conftest import DEFAULTS
from vtoken import wire
from vtoken.sentences.advice import put_into_words
from vtoken.wire import commands
from vtoken.wire.commands import Command
from vtoken_api.bus import engines_of
from vtoken_api.ending import Ending
from vtoken_api.fanout.hub import Hub
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

TURNS = [reference.random_prompt(length, seed) for seed, length in enumerate((100, 60, 30))]
OTHER = reference.random_prompt(90, 9)
NUM_NEW = 20
EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 64,
    "evict_when": "always",
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
    for _ in range(1000):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        outputs, _ = core.step_fn()
        for client in (outputs or {}).values():
            for output in client.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError("requests do not end")


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
        assert runtime.requests.announced == {}
        assert runtime.counters.tokens.evicted > 0
        assert runtime.counters.invariants.violations == 0
        runtime.check()
    assert tokens["session"] == expected


def test_an_idle_session_is_named_and_its_end_frees_its_blocks_for_others(engine: Any) -> None:
    args = engine_args({"policy": {"name": "streaming_llm"}, "evict_when": "pressure"})
    tokens: dict[str, list[int]] = {}
    with engine(num_gpu_blocks_override=12, max_model_len=256, **args) as llm:
        scheduler = scheduler_of(llm)
        controller = scheduler.vtoken_controller

        def call(kind: Any, **arguments: Any) -> Any:
            scheduler._count_requests()
            return controller.handle(Command(call=kind(**arguments), actor="ana"))

        for name, prompt in (("one", TURNS[0]), ("two", OTHER)):
            add(llm, name, prompt, resumable=True)
        step(llm, tokens)
        counts = call(commands.Status).value.requests
        assert (counts.running, counts.waiting, counts.idle) == (0, 0, 2)
        assert (counts.sessions, counts.session_blocks) == (2, 8)
        add(llm, "plain", OTHER + OTHER, resumable=False)
        for _ in range(10):
            llm.llm_engine.engine_core.engine_core.step_fn()
        rows = {row.id: row for row in call(commands.Requests).value}
        assert {(n, r.state, r.session) for n, r in rows.items()} == {
            ("one", "idle", True),
            ("two", "idle", True),
            ("plain", "waiting", False),
        }
        status = call(commands.Status).value
        assert status.requests.waiting == 1
        put_into_words(status)
        (held,) = (one.text for one in status.advice if one.code == "session")
        assert held == "2 sessions hold 8 of 11 blocks and give nothing: end one"
        assert call(commands.End, request_id="plain").problem.status == 409
        ended = call(commands.End, request_id="two").value
        assert (ended.request_id, ended.freed_blocks) == ("two", 4)
        step(llm, tokens)
        assert len(tokens["plain"]) == NUM_NEW
        assert call(commands.Request, request_id="two").value.state == "finished"
        runtime_of(llm).check()


def test_turns_that_wait_for_each_other_are_said_to_and_an_end_frees_them(engine: Any) -> None:
    args = engine_args({"policy": {"name": "streaming_llm"}, "evict_when": "pressure"})
    tokens: dict[str, list[int]] = {}
    with engine(num_gpu_blocks_override=9, max_model_len=256, **args) as llm:
        core = llm.llm_engine.engine_core.engine_core
        controller = core.scheduler.vtoken_controller
        for name, prompt in (("one", TURNS[0]), ("two", OTHER)):
            add(llm, name, prompt, resumable=True)
        step(llm, tokens)
        for name in ("one", "two"):
            add(llm, name, TURNS[1], resumable=True)
        for _ in range(20):
            core.step_fn()
        core.scheduler._count_requests()
        status = controller.reporter.status()
        assert (status.requests.running, status.requests.waiting, status.requests.idle) == (0, 2, 0)
        assert (status.fragmentation.cause, status.pressure.waits_for) == ("full", "end")
        put_into_words(status)
        assert status.fragmentation.sentence.startswith("FULL: 2 wait")
        assert "2 sessions hold 8 of 8 blocks and give nothing: end one" in [
            one.text for one in status.advice
        ]
        end = Command(call=commands.End(request_id="two"), actor="ana")
        assert controller.handle(end).value.freed_blocks == 4
        step(llm, tokens)
        assert len(tokens["one"]) == 2 * NUM_NEW
        runtime_of(llm).check()


@pytest.mark.slow
async def test_the_client_of_a_session_that_is_ended_gets_its_end(demo_model: Path) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    never = asyncio.Event()

    async def turns() -> AsyncIterator[Any]:
        yield StreamingInput(prompt={"prompt_token_ids": list(TURNS[0])})
        await never.wait()

    args = {**DEFAULTS, "max_model_len": 256, **engine_args({"policy": {"name": "streaming_llm"}})}
    client = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(demo_model), **args))
    try:
        (bus,) = engines_of(client)
        hub = Hub(bus)
        hub.tell("server", Ending(client).take)
        following = asyncio.create_task(hub.run())
        params = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        reasons, finished = [], []
        async with asyncio.timeout(LIMIT_S):
            async for output in client.generate(turns(), params, "session"):
                reasons.append(output.outputs[0].finish_reason)
                finished.append(output.finished)
                if reasons[-1] == "length":  # the turn has ended, the session has not
                    end = commands.End(request_id="session")
                    assert (await bus.ask(end, wire.Ended)).freed_blocks == 4
        assert (reasons[-1], finished[-1], finished[:-1].count(True)) == ("abort", True, 0)
        (row,) = [await bus.ask(commands.Status(), wire.Status)]
        assert (row.requests.sessions, row.requests.idle) == (0, 0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    finally:
        context = client.engine_core.resources.ctx
        client.shutdown()
        context.destroy(linger=0)  # vLLM leaves it to the collection of garbage
