"""Eviction under pressure on the real engine: stock tokens while memory is ample, exact ones after.

Pools are small, so that requests give tokens; the logged victims replay in the reference.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, core_of, scheduler_of
from tests.support.stepping import add, step
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

BUDGET, NUM_NEW = 96, 160
PROMPTS = [reference.random_prompt(100 + 17 * i, 60 + i) for i in range(6)]
POOL = {"num_gpu_blocks_override": 43, "max_model_len": 512, "max_num_batched_tokens": 512}
POLICIES = ["auto", "streaming_llm", "snapkv", "h2o"]  # `auto`: what ships
# It keeps 256 tokens of a prompt at least.
LONG = [reference.random_prompt(320 + 30 * i, 60 + i) for i in range(4)]
LONG_POOL = POOL | {"num_gpu_blocks_override": 53, "max_model_len": 1024}


def args(policy: str, when: str = "pressure", **config: Any) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if policy != "auto":
        own = {"policy": {"name": policy}, "budget_tokens": BUDGET, "interval_tokens": 32}
        own |= {"evict_when": when, "headroom_blocks": 2}
    return engine_args(own | {"verify_ratio": 1.0, **config}, check_every_step=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_ample_memory_the_worker_gets_no_plan_and_tokens_are_stock(
    policy: str, engine: Any, greedy: Any, hf_model: Any
) -> None:
    with engine(**args(policy)) as llm:
        observer, plans = Observer(llm), []
        concerns = observer.runtime.concerns_worker

        def note(plan: Any) -> bool:
            plans.append(concerns(plan))
            return bool(plans[-1])

        observer.runtime.concerns_worker = note
        tokens = greedy(llm, PROMPTS[:2], NUM_NEW)
        assert observer.runtime.counters.tokens.evicted == 0
        assert not any(plans)
    for prompt, found in zip(PROMPTS, tokens, strict=False):
        assert found == reference.generate(hf_model, prompt, NUM_NEW, reference.full, draft=found)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
def test_short_memory_takes_tokens_and_preempts_nobody(
    policy: str, overlap: bool, engine: Any, greedy: Any, hf_model: Any
) -> None:
    scheduling = async_scheduling() if overlap else nullcontext()
    prompts, pool = (LONG, LONG_POOL) if policy == "auto" else (PROMPTS, POOL)
    with scheduling, engine(enable_prefix_caching=False, **pool, **args(policy)) as llm:
        observer = Observer(llm)
        num_free = observer.runtime.store.num_free_blocks()
        tokens = greedy(llm, prompts, NUM_NEW)
        counters, logs = observer.runtime.counters, observer.logs()
        assert counters.invariants.violations == 0
        assert counters.pressure.given_tokens == counters.tokens.evicted > 0
        assert counters.pressure.preemptions_above_floor == 0
        assert counters.requests.preempted == 0
        assert observer.runtime.store.num_free_blocks() == num_free
    for prompt, found, log in zip(prompts, tokens, logs, strict=True):
        assert found == reference.generate(
            hf_model, prompt, NUM_NEW, reference.replay(log), draft=found
        )


def test_an_answer_says_what_its_request_kept_if_it_asks(engine: Any) -> None:
    from vllm import SamplingParams

    def params(**asked: Any) -> Any:
        return SamplingParams(
            temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, extra_args=asked or None
        )

    with engine(enable_prefix_caching=False, **POOL, **args("streaming_llm")) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        asking = [params(vtoken_report=1) for _ in prompts[1:]]
        silent, *answers = llm.generate(prompts, [params(), *asking], use_tqdm=False)
        finished = Observer(llm).runtime.counters.requests.finished
    assert finished == len(PROMPTS)
    assert silent.kv_transfer_params is None
    reports = [answer.kv_transfer_params["vtoken"] for answer in answers]
    assert sum(report["given_tokens"] for report in reports) > 0
    for report, prompt in zip(reports, PROMPTS[1:], strict=True):
        assert report["dead"] == report["given_tokens"]
        assert report["live"] + report["dead"] == len(prompt) + NUM_NEW - 1
        assert (report["policy"], report["budget_tokens"]) == ("streaming_llm", BUDGET)


def test_fewer_tokens_die_than_under_a_fixed_budget_and_nobody_waits_longer(
    engine: Any, greedy: Any
) -> None:
    evicted, steps = {}, {}
    for when in ("always", "pressure"):
        with engine(enable_prefix_caching=False, **POOL, **args("snapkv", when)) as llm:
            observer = Observer(llm)
            greedy(llm, PROMPTS, NUM_NEW)
            evicted[when] = observer.runtime.counters.tokens.evicted
            steps[when] = observer.runtime.step
            assert observer.runtime.counters.requests.preempted == 0
    assert evicted["pressure"] < evicted["always"]
    assert steps["pressure"] <= 1.05 * steps["always"]


def test_a_prompt_gives_between_its_chunks(engine: Any, greedy: Any, hf_model: Any) -> None:
    """Two prompts that fit only one at a time as wholes."""
    prompts = [reference.random_prompt(700, seed) for seed in (1, 2)]
    config = args("auto", evict_during="both", budget_tokens=BUDGET)
    with engine(
        enable_prefix_caching=False,
        num_gpu_blocks_override=33,
        max_model_len=1000,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=96,
        **config,
    ) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, prompts, 64)
        counters, logs = observer.runtime.counters, observer.logs()
        assert counters.invariants.violations == 0
        assert counters.pressure.given_tokens > 0
        assert counters.pressure.preemptions_above_floor == 0
    for found, log in zip(tokens, logs, strict=True):
        assert len(found) == 64
        assert len(log) > 0


@pytest.mark.parametrize("cadence", ["of the engine", "of the scheduler"])
def test_nobody_gives_for_a_prompt_that_vllm_holds_back(cadence: str, engine: Any) -> None:
    """Of every four steps one computes a chunk of the prompt. The other request gives nothing, and
    grows in its last block.
    """
    long, short = reference.random_prompt(500, 1), reference.random_prompt(290, 2)
    own = {} if cadence == "of the engine" else {"prefill_schedule_interval": 4}
    with engine(
        enable_prefix_caching=False,
        num_gpu_blocks_override=20,
        max_model_len=600,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=96,
        **own,
        **args("streaming_llm", evict_during="both"),
    ) as llm:
        core, scheduler = core_of(llm), scheduler_of(llm)
        if own and not hasattr(scheduler, "local_prefill_interval"):
            pytest.skip("this vLLM has no cadence of one engine alone")
        pressure, held = scheduler.vtoken.counters.pressure, 0
        add(llm, "a", short, 40, extra_args={"vtoken_policy": "none"})
        step(llm, times=4)
        add(llm, "b", long, 4)
        for number in range(24):
            if not own:
                core._should_throttle_prefills = lambda held=number % 4: bool(held)
            before = pressure.given_tokens, computed(scheduler)
            step(llm, times=1)
            if before[1] == computed(scheduler) > 0:
                held += 1
                assert pressure.given_tokens == before[0]
        assert held >= 12
        assert pressure.given_tokens > 0
        assert scheduler.vtoken.counters.invariants.violations == 0


def computed(scheduler: Any) -> int:
    """How many tokens of the prompt of request "b" are computed."""
    found = [r.num_computed_tokens for n, r in scheduler.requests.items() if n.startswith("b")]
    return sum(found)


def test_shared_prefixes_stay_exact(engine: Any, greedy: Any, hf_model: Any) -> None:
    head = reference.random_prompt(128, 3)
    prompts = [head + reference.random_prompt(40 + 9 * i, 70 + i)[1:] for i in range(6)]
    for config in (
        args("auto", budget_floor_tokens=BUDGET),  # as ships, for prompts as short as these
        args("snapkv", prefix_sharing="copy"),
    ):
        with engine(**POOL, **config) as llm:
            greedy(llm, prompts[:1], 1)
            observer = Observer(llm)
            tokens = greedy(llm, prompts, NUM_NEW)
            counters, logs = observer.runtime.counters, observer.logs()
            assert counters.invariants.violations == 0
            assert counters.pressure.given_tokens > 0
        if counters.requests.preempted:
            continue  # the log of a request that began again does not replay
        for prompt, found, log in zip(prompts, tokens, logs, strict=True):
            assert found == reference.generate(
                hf_model, prompt, NUM_NEW, reference.replay(log), draft=found
            )


def test_forgotten_tokens_give_before_others(engine: Any, hf_model: Any) -> None:
    """Those of some requests' arguments, and those of a request that is told while it runs."""
    from vllm import SamplingParams

    with_request, later = [*range(8), *range(30, 70)], range(20, 60)
    told_at = len(PROMPTS[-1]) + NUM_NEW // 4
    with engine(enable_prefix_caching=False, **POOL, **args("snapkv")) as llm:
        observer = Observer(llm)
        runtime = observer.runtime
        begin = runtime.begin_step

        def tell_then_begin(*step: Any) -> None:
            for name, request in runtime.requests.held.items():
                last = request.num_prompt_tokens == len(PROMPTS[-1])
                if last and runtime.tables[name].num_tokens == told_at:
                    runtime.requests.forget_tokens(name, ((later.start, later.stop),))
            begin(*step)

        runtime.begin_step = tell_then_begin
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=NUM_NEW,
                ignore_eos=True,
                extra_args={"vtoken_forget": [0, 8, 30, 70]} if n < 3 else None,
            )
            for n in range(len(PROMPTS))
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        counters, logs = runtime.counters, observer.logs()
        assert counters.invariants.violations == 0
        assert counters.pressure.given_tokens == counters.tokens.evicted > 0
        assert counters.requests.preempted == 0
        assert runtime.requests.num_forgets == 1
    for prompt, output, log in zip(PROMPTS, outputs, logs, strict=True):
        found = list(output.outputs[0].token_ids)
        assert found == reference.generate(
            hf_model, prompt, NUM_NEW, reference.replay(log), draft=found
        )
    for log in logs[:3]:
        check_first([*log.values()], with_request)
    early = {t for step, died in logs[-1].items() if step < NUM_NEW // 4 for t in died}
    evictions = [died for step, died in logs[-1].items() if step >= NUM_NEW // 4]
    check_first(evictions, [token for token in later if token not in early])


def check_first(evictions: list[set[int]], named: list[int]) -> None:
    """The live tokens `named` are the first that die in `evictions`, and in order."""
    assert evictions
    for victims in evictions:
        first, named = named[: len(victims)], named[len(victims) :]
        assert set(first) <= victims
