"""Two real ranks on CPU, each with half of the heads: one plan, one report, and detected
differences.

One engine serves all tests of this file, in order: the last ones break it on purpose. Two ranks add
floats in a different order from one, so tokens are compared with the reference up to a near tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.engines import EAGER, engine_args
from tests.support.live_sets import swinging_budget
from tests.support.observe import runtime_of
from tests.support.parallel import (
    Tokens,
    count_wrongly,
    everywhere,
    lose_a_copy,
    move_a_token,
    num_sure,
    on_rank,
    patch,
    preempt_once,
    run_and_break,
    scored_run,
    shape_of_cache,
)
from vtoken.base.errors import InvariantViolation

pytestmark = pytest.mark.vllm

NUM_NEW, NUM_SCORED = 80, 56  # two evictions of each prompt
BUDGET, INTERVAL = 64, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((150, 70, 101))]


def args(**config: Any) -> dict[str, Any]:
    config = {
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "verify_ratio": 1.0,
        **EAGER,
        **config,
    }
    settings = {"check_every_step": True, "strict": False}
    return {"enable_prefix_caching": False, **engine_args(config, **settings)}


@pytest.fixture(scope="module")
def two_ranks(engine: Any) -> Iterator[Any]:
    import vllm.envs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        vllm.envs.disable_envs_cache()  # an earlier engine of this process has turned it on
        parallel = {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "kv_cache_memory_bytes": 32 << 20,  # a rank, half of what one rank gets elsewhere
        }
        with engine(**parallel, **args(policy={"name": "streaming_llm"})) as llm:
            yield llm


# ---------------------------------------------------------------- exact


def test_two_ranks_hold_half_of_the_heads_each_of_the_same_blocks(two_ranks: Any) -> None:
    shapes = everywhere(two_ranks, shape_of_cache)
    geometry = runtime_of(two_ranks).geometry
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
    assert geometry.num_kv_heads == 2 * shapes[0][1]
    assert geometry.bytes_per_token == geometry.num_layers * 2 * 2 * geometry.head_size * 4


def test_tokens_equal_the_reference_and_the_variants_each_other(
    two_ranks: Any, greedy: Any, hf_model: Any
) -> None:
    runs: dict[str, Tokens] = {}
    runtime = runtime_of(two_ranks)
    for name, changes in {
        "plug": {"recycle": False},
        "naive-evict": {"reclamation": "off"},
        "recycling": {
            "recycle": True,
            "reclamation": "auto",
            "experiment": {"round_rule": "paper"},
            "theta_f": 1.0,
        },
    }.items():
        patch(two_ranks, **changes)
        before = (
            runtime.counters.reclamation.relocations,
            runtime.counters.reclamation.recycled_slots,
        )
        runs[name] = greedy(two_ranks, PROMPTS, NUM_NEW)
        assert (runtime.counters.reclamation.relocations > before[0]) == (name == "plug")
        assert (runtime.counters.reclamation.recycled_slots > before[1]) == (name == "recycling")
    assert runtime.counters.invariants.violations == 0
    assert runtime.counters.tokens.evicted > 400
    assert runs["plug"] == runs["naive-evict"] == runs["recycling"]
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    for prompt, tokens in zip(PROMPTS, runs["plug"], strict=True):
        trace = reference.trace(hf_model, prompt, NUM_NEW, evict, draft=tokens)
        sure = num_sure(trace)
        assert sure > NUM_NEW // 2
        assert tokens[:sure] == trace.tokens[:sure]


def test_parked_tokens_come_back_on_both_ranks(two_ranks: Any, hf_model: Any) -> None:
    found, logs = swinging_budget(two_ranks, PROMPTS, NUM_NEW, (BUDGET, 200))
    for prompt, tokens, log in zip(PROMPTS, found, logs, strict=True):
        trace = reference.trace_log(hf_model, prompt, NUM_NEW, log, draft=tokens)
        sure = num_sure(trace)
        assert sure > NUM_NEW // 2
        assert tokens[:sure] == trace.tokens[:sure]


def test_a_request_that_is_swapped_goes_on_on_both_ranks(
    two_ranks: Any, greedy: Any, hf_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtoken.core.runtime.prices.Prices.prefill_us", 1e6)
    patch(two_ranks, park_bytes=64 << 20)
    counters = runtime_of(two_ranks).counters
    preempt_once(two_ranks, after_steps=40)  # two of three requests have evicted by then
    found = greedy(two_ranks, PROMPTS, NUM_NEW)
    assert counters.parking.swapped_requests == counters.requests.preempted == 1
    assert counters.invariants.violations == 0
    patch(two_ranks, park_bytes=0)
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        trace = reference.trace(hf_model, prompt, NUM_NEW, evict, draft=tokens)
        assert tokens[: num_sure(trace)] == trace.tokens[: num_sure(trace)]


MAXIMA = {"heads": "max", "pool": "max", "pool_radius": 2}
R_KV = {"window": 8, "mix_lambda": 0.1, "pool_radius": 3}


@pytest.mark.parametrize(
    ("policy", "params", "probe"),
    [
        ("scissorhands", {"history_queries": 400}, {}),
        ("h2o", {"pool_radius": 0}, {}),
        ("tova", MAXIMA, {"layers": [1, 3]}),
        (
            "snapkv",
            {"window": 8, "pool_radius": 2, "queries": "max", "layers": "max"},
            {"heads": [2, 3]},
        ),
        ("h2o", {"pool_radius": 0}, {"heads": [0]}),
        ("knorm", MAXIMA, {"layers": [0, 2], "heads": [1]}),
        ("r_kv", R_KV, {"layers": [0, 2]}),
        ("r_kv", {**R_KV, "pool": "max"}, {"heads": [1]}),
    ],
    ids=[
        "hits",
        "sums",
        "maxima",
        "heads of one rank",
        "a head",
        "a head's keys",
        "redundancy",
        "a head's",
    ],
)
def test_scores_of_two_ranks_are_those_of_one(
    policy: str,
    params: dict[str, Any],
    probe: dict[str, Any],
    two_ranks: Any,
    engine: Any,
    greedy: Any,
) -> None:
    """Hits and maxima need the rows of all heads; a rank may hold none of a signal's heads."""
    probe = {"layers": [2], "heads": [], **probe}
    change = {"policy": {"name": policy, "params": params}, "probe": probe}
    patch(two_ranks, **change)
    tokens, logs, scores = scored_run(two_ranks, greedy, PROMPTS, NUM_SCORED)
    with engine(**args(**change)) as one:
        tokens_of_one, logs_of_one, expected = scored_run(one, greedy, PROMPTS, NUM_SCORED)
    assert (tokens, logs) == (tokens_of_one, logs_of_one)
    assert all(len(log) > 1 for log in logs)
    for request, reports in expected.items():
        for mine, other in zip(scores[request], reports, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- broken on purpose


def change_next_plan(worker: Any) -> None:
    """Make rank 1 write the next token to another slot; all counts still match."""
    if worker.rank != 1:
        return
    runner = worker.model_runner
    update = runner._update_states

    def update_states(scheduler_output: Any) -> Any:
        del runner._update_states
        requests = scheduler_output.vtoken.requests
        values = requests.new_slots.values.copy()
        values[0] += 1
        requests.new_slots = requests.new_slots._replace(values=values)
        return update(scheduler_output)

    runner._update_states = update_states


def test_control_a_mirror_that_drifted_on_one_rank_is_named(two_ranks: Any) -> None:
    patch(two_ranks, policy={"name": "streaming_llm"}, interval_tokens=0)
    assert run_and_break(two_ranks, PROMPTS[::2], shape_of_cache) == []  # harmless
    (first, *_) = run_and_break(two_ranks, PROMPTS[::2], on_rank(1, move_a_token))
    assert "rank 1 has a different mirror from rank 0" in first


def test_control_a_plan_that_differs_on_one_rank_is_named(two_ranks: Any) -> None:
    (first, *_) = run_and_break(two_ranks, PROMPTS[::2], change_next_plan)
    assert "rank 1 runs a different plan from rank 0" in first


def test_a_violation_on_the_other_rank_reaches_the_scheduler(two_ranks: Any) -> None:
    patch(two_ranks, recycle=False, theta_f=0.0, interval_tokens=8)
    before = runtime_of(two_ranks).counters.reclamation.copy_us
    (only,) = run_and_break(two_ranks, PROMPTS[::2], on_rank(1, lose_a_copy))
    assert "rank 1: relocation of b" in only
    copy_us = runtime_of(two_ranks).counters.reclamation.copy_us - before
    assert copy_us > 10_000_000  # the slowest rank counts


def test_a_rank_that_differs_stops_the_engine_in_strict_mode(two_ranks: Any) -> None:
    runtime_of(two_ranks).current.strict = True
    with pytest.raises(InvariantViolation, match="rank 1 has a different mirror"):
        run_and_break(two_ranks, PROMPTS[::2], on_rank(1, move_a_token))
    two_ranks.llm_engine.abort_request(list(runtime_of(two_ranks).requests.held), internal=True)


def test_a_plan_that_one_rank_cannot_apply_stops_all_of_them(two_ranks: Any) -> None:
    """Otherwise the other rank would wait for it in the forward for ever."""
    with pytest.raises(RuntimeError, match=r"step \d+: rank 1: MirrorMismatchError"):
        run_and_break(two_ranks, PROMPTS[::2], on_rank(1, count_wrongly))
