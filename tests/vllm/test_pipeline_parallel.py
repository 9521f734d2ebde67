"""Two real pipeline stages on CPU, each with half of the layers: one plan, one report, two steps in
flight.

One engine serves all tests of this file, in order: the last ones break it on purpose. A stage
computes what one stage with all layers would, so tokens equal the reference exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.engines import EAGER, engine_args
from tests.support.live_sets import expected_tokens, swinging_budget
from tests.support.observe import Observer, core_of, resumed, runtime_of
from tests.support.parallel import (
    Tokens,
    count_wrongly,
    everywhere,
    lose_a_copy,
    move_a_token,
    on_rank,
    patch,
    run_and_break,
    scored_run,
    shape_of_cache,
)
from vtoken.policies import make_policy
from vtoken.wire.commands import Compact

pytestmark = pytest.mark.vllm

NUM_NEW = 80
BUDGET, INTERVAL = 64, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((150, 70, 101, 90))]
LAYERS = 4  # of the demo model


def args(**config: Any) -> dict[str, Any]:
    config = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "verify_ratio": 1.0,
        **EAGER,
        **config,
    }
    return engine_args(config, check_every_step=True, strict=False)


@pytest.fixture(scope="module")
def two_stages(engine: Any) -> Iterator[Any]:
    parallel = {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "kv_cache_memory_bytes": 32 << 20,  # a stage, half of what one stage gets elsewhere
    }
    with engine(**parallel, **args()) as llm:
        yield llm


@pytest.fixture(autouse=True)
def fresh(two_stages: Any) -> None:
    """No prefix hits from an earlier test."""
    assert core_of(two_stages).scheduler.reset_prefix_cache()


def staggered(llm: Any, prompts: Tokens, preempt_at: int | None = None) -> tuple[Tokens, int]:
    """Greedy tokens of requests that begin in different steps, so that steps in flight are of
    different requests, and how many tokens of prompts were hits. At step `preempt_at`, all running
    requests are preempted.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    answers: dict[int, list[int]] = {}
    hits: dict[int, int] = {}
    steps, waiting = 0, [*enumerate(prompts)]
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting:
            number, prompt = waiting.pop(0)
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for output in llm.llm_engine.step():
            number = int(output.request_id.split("-")[0])
            answers[number] = list(output.outputs[0].token_ids)
            hits[number] = output.num_cached_tokens
        if steps == preempt_at:
            assert core_of(llm).scheduler.reset_prefix_cache(reset_running_requests=True)
        steps += 1
    return [answers[number] for number in range(len(prompts))], sum(hits.values())


@pytest.fixture(scope="module")
def expected(hf_model: Any) -> Tokens:
    """The reference's tokens of `PROMPTS` under streaming_llm."""
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    return [reference.generate(hf_model, prompt, NUM_NEW, evict) for prompt in PROMPTS]


# ---------------------------------------------------------------- exact


def test_two_stages_hold_half_of_the_layers_each_of_the_same_blocks(two_stages: Any) -> None:
    shapes = everywhere(two_stages, shape_of_cache)
    geometry = runtime_of(two_stages).geometry
    assert shapes[0] == shapes[1]
    assert geometry.num_kv_heads == shapes[0][1]
    assert geometry.num_layers == LAYERS
    assert geometry.bytes_per_token == LAYERS * geometry.num_kv_heads * 2 * geometry.head_size * 4
    assert everywhere(two_stages, layers_of) == [[0, 1], [2, 3]]


def layers_of(worker: Any) -> list[int]:
    context = worker.model_runner.compilation_config.static_forward_context
    return sorted(layer.impl.vtoken_layer for layer in context.values())


VARIANTS: dict[str, dict[str, Any]] = {
    "plug": {"recycle": False},
    "pack": {"experiment": {"planner": "pack"}},
    "naive-evict": {"experiment": {"planner": "plug"}, "reclamation": "off"},
    "recycling": {
        "recycle": True,
        "reclamation": "auto",
        "experiment": {"round_rule": "paper"},
        "theta_f": 1.0,
    },
}


def test_tokens_equal_the_reference_with_two_steps_in_flight(
    two_stages: Any, expected: Tokens
) -> None:
    runtime, core = runtime_of(two_stages), core_of(two_stages)
    counters = runtime.counters.reclamation
    assert core.batch_queue_size == 2
    assert runtime.shape.report_lag_steps == 1
    for name, changes in VARIANTS.items():
        patch(two_stages, **changes)
        before = counters.relocations, counters.recycled_slots
        with overlaps(core) as pairs:
            found, _ = staggered(two_stages, PROMPTS)
        assert found == expected, name
        assert sum(bool(a) and bool(b) and not a & b for a, b in pairs) > NUM_NEW
        assert (counters.relocations > before[0]) == (name in ("plug", "pack"))
        assert (counters.recycled_slots > before[1]) == (name == "recycling")
    assert runtime.counters.invariants.violations == 0
    assert runtime.counters.tokens.evicted > 400


class overlaps:  # noqa: N801
    """The requests of a step and of the one that was in flight when it was scheduled."""

    def __init__(self, core: Any) -> None:
        self._core, self._schedule = core, core.scheduler.schedule
        self.pairs: list[tuple[set[str], set[str]]] = []

    def __enter__(self) -> list[tuple[set[str], set[str]]]:
        def schedule(*args: Any) -> Any:
            output = self._schedule(*args)
            for _, earlier, _ in self._core.batch_queue:
                self.pairs.append(({*earlier.num_scheduled_tokens}, {*output.num_scheduled_tokens}))
            return output

        self._core.scheduler.schedule = schedule
        return self.pairs

    def __exit__(self, *error: object) -> None:
        self._core.scheduler.schedule = self._schedule


def test_prefix_hits_a_preemption_and_compactions_keep_tokens(
    two_stages: Any, hf_model: Any, expected: Tokens
) -> None:
    patch(
        two_stages,
        recycle=False,
        reclamation="auto",
        experiment={"round_rule": "price"},
        theta_f=0.0,
    )
    runtime, scheduler = runtime_of(two_stages), core_of(two_stages).scheduler
    assert staggered(two_stages, PROMPTS) == (expected, 0)
    found, hits = staggered(two_stages, PROMPTS)
    assert found == expected
    assert hits > 200

    cuts = resumed(two_stages)
    found, _ = staggered(two_stages, PROMPTS, preempt_at=50)
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    for number, (prompt, cut) in enumerate(zip(PROMPTS, sorted_by_number(cuts), strict=True)):
        first, rest = found[number][:cut], found[number][cut:]
        assert first == expected[number][:cut]
        again = prompt + first
        assert rest == reference.generate(hf_model, again, len(rest), evict, draft=rest)
    assert runtime.counters.requests.preempted == len(PROMPTS)

    patch(two_stages, reclamation="paused")
    operations: list[Any] = []
    begin = runtime.begin_step

    def begin_step(*args: Any) -> None:
        if runtime.step % 7 == 0:
            operations.append(scheduler.vtoken_controller.compact(Compact(), ""))
        begin(*args)

    runtime.begin_step = begin_step
    found, _ = staggered(two_stages, PROMPTS)
    runtime.begin_step = begin
    assert found == expected
    assert {operation.state for operation in operations} == {"done"}
    assert sum(operation.result.freed_blocks for operation in operations) > 0
    patch(two_stages, reclamation="auto")
    assert runtime.counters.invariants.violations == 0


def sorted_by_number(cuts: dict[str, list[int]]) -> list[int]:
    found = [cuts[request] for request in sorted(cuts, key=lambda name: int(name.split("-")[0]))]
    assert all(len(cut) == 1 for cut in found)
    return [cut[0] for cut in found]


def test_parked_tokens_come_back_on_both_stages(two_stages: Any, hf_model: Any) -> None:
    found, logs = swinging_budget(two_stages, PROMPTS, NUM_NEW, (BUDGET, 200))
    for prompt, tokens, log in zip(PROMPTS, found, logs, strict=True):
        assert tokens == expected_tokens(hf_model, prompt, tokens, log)


MAXIMA = {"heads": "max", "pool": "max", "pool_radius": 2}
R_KV = {"window": 8, "mix_lambda": 0.1, "pool_radius": 3}


SCORES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sums over stages": ("h2o", {"pool_radius": 0}, {"layers": [1, 2, 3]}),
    "a window over stages": (
        "snapkv",
        {"window": 8, "pool_radius": 2, "queries": "max", "layers": "max"},
        {"layers": [1, 3]},
    ),
    "redundancy of rows over stages": ("r_kv", {**R_KV, "pool": "max"}, {"layers": [1, 2]}),
}
MORE_SCORES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "the default layer's keys": ("keydiff", {}, {}),
    "an early layer": ("h2o", {"pool_radius": 0}, {"layers": [0]}),
    "hits over stages": ("scissorhands", {"history_queries": 400}, {"layers": [1, 2]}),
    "maxima over stages": ("tova", MAXIMA, {"layers": [0, 3]}),
    "rows of the first stage alone": ("tova", {"heads": "max"}, {"layers": [0, 1]}),
    "keys over stages": ("knorm", MAXIMA, {"layers": [0, 2]}),
    "keys seen over stages": ("keydiff", {**MAXIMA, "anchor": "seen"}, {"layers": [0, 2]}),
    "redundancy over stages": ("r_kv", R_KV, {"layers": [0, 2]}),
}
CASES = {**SCORES, **MORE_SCORES} if os.environ.get("VTOKEN_ALL_MODELS") else SCORES


@pytest.mark.parametrize(("policy", "params", "probe"), CASES.values(), ids=CASES)
def test_scores_of_two_stages_are_those_of_one(
    policy: str,
    params: dict[str, Any],
    probe: dict[str, Any],
    two_stages: Any,
    engine: Any,
    hf_model: Any,
    greedy: Any,
) -> None:
    probe = {"layers": [], "heads": [], **probe}
    change = {"policy": {"name": policy, "params": params}, "probe": probe}
    patch(two_stages, policy={"name": "streaming_llm"})  # or the last case's parameters stay
    patch(two_stages, **change)
    tokens, logs, scores = scored_run(two_stages, greedy, PROMPTS, NUM_NEW)
    with engine(**args(**change, recycle=False)) as one:
        tokens_of_one, logs_of_one, of_one = scored_run(one, greedy, PROMPTS, NUM_NEW)
    assert all(len(log) > 1 for log in logs)
    assert runtime_of(two_stages).counters.invariants.violations == 0
    reads = make_policy(policy, params).reads
    if reads is not None and reads.of_keys:
        # Asked for a step early, a later reading lacks a token, so that other tokens may die.
        same = [
            (scores[i][0], of_one[i][0]) for i in of_one if len(scores[i][0]) == len(of_one[i][0])
        ]
        assert len(same) >= len(PROMPTS) - 1
        for report, of_first in same:
            np.testing.assert_allclose(report, of_first, rtol=1e-4, atol=1e-5)
        for prompt, found, log in zip(PROMPTS, tokens, logs, strict=True):
            replay = reference.replay(log)
            assert found == reference.generate(hf_model, prompt, NUM_NEW, replay, draft=found)
        return
    assert (tokens, logs) == (tokens_of_one, logs_of_one)
    for request, reports in of_one.items():
        newest = {len(report): report for report in scores[request]}  # two stages ask a step early
        for report in reports:
            np.testing.assert_allclose(newest[len(report)], report, rtol=1e-4, atol=1e-5)


def test_attention_scores_last_over_steps_of_other_requests(two_stages: Any, hf_model: Any) -> None:
    """A step of other requests, or of none, must not make a worker forget what it keeps."""
    change = {"policy": {"name": "h2o", "params": {"pool_radius": 0}}, "probe": {"layers": [1, 2]}}
    patch(two_stages, **change)
    observer = Observer(two_stages)
    found, _ = staggered(two_stages, PROMPTS)
    observer.restore()
    logs = observer.logs()
    for prompt, tokens, log in zip(PROMPTS, found, logs, strict=True):
        replay = reference.replay(log)
        assert tokens == reference.generate(hf_model, prompt, NUM_NEW, replay, draft=tokens)
    assert all(len(log) > 2 for log in logs)
    assert observer.steps_with_holes > 0
    for number in range(len(PROMPTS)):
        core_of(two_stages).scheduler.reset_prefix_cache()
        alone = Observer(two_stages)
        staggered(two_stages, PROMPTS[number : number + 1])
        alone.restore()
        assert alone.logs() == [logs[number]]


# ---------------------------------------------------------------- broken on purpose


def test_control_a_mirror_that_drifted_on_one_stage_is_named(two_stages: Any) -> None:
    patch(two_stages, policy={"name": "streaming_llm"}, probe={"layers": []}, interval_tokens=0)
    patch(two_stages, recycle=True)  # a relocation would find the token too
    assert run_and_break(two_stages, PROMPTS[::2], shape_of_cache, 12) == []  # harmless
    (first, *_) = run_and_break(two_stages, PROMPTS[::2], on_rank(1, move_a_token), 12)
    assert "stage 1 has a different mirror from stage 0" in first


def test_control_a_lost_copy_on_the_first_stage_reaches_the_scheduler(two_stages: Any) -> None:
    patch(two_stages, recycle=False, theta_f=0.0, interval_tokens=8)
    before = runtime_of(two_stages).counters.reclamation.copy_us
    (only,) = run_and_break(two_stages, PROMPTS[::2], on_rank(0, lose_a_copy), 12)
    assert "stage 0: relocation of b" in only
    assert runtime_of(two_stages).counters.reclamation.copy_us - before > 10_000_000


def test_a_plan_that_an_early_stage_cannot_apply_stops_the_later_ones(two_stages: Any) -> None:
    """Otherwise the later stage would wait for hidden states until vLLM's time limit."""
    with pytest.raises(RuntimeError, match=r"step \d+: stage 0: MirrorMismatchError"):
        run_and_break(two_stages, PROMPTS[::2], on_rank(0, count_wrongly), 12)
