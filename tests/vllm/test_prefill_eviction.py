"""Eviction between the chunks of a prompt, against a reference that prunes at the same borders."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, runtime_of
from vtoken.vllm.engine.scheduler import scores_prompt
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

CHUNK, BUDGET, NUM_NEW = 96, 128, 64
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((700, 333, 180))]
ENGINE = {"enable_prefix_caching": False, "long_prefill_token_threshold": CHUNK}
VARIANTS: dict[str, dict[str, Any]] = {
    "plug": {"experiment": {"planner": "plug"}},
    "pack": {"experiment": {"planner": "pack"}},
    "naive": {"reclamation": "off"},
}


def vtoken_args(policy: str, during: str, **config: Any) -> dict[str, Any]:
    return engine_args(
        {
            "policy": {"name": policy},
            "budget_tokens": BUDGET,
            "evict_when": "always",
            "interval_tokens": 32,
            "evict_during": during,
            "theta_f": 0.0,
            "low_watermark_blocks": 512,
            "headroom_blocks": 64,
            "verify_ratio": 1.0,
            **config,
        },
        check_every_step=True,
    )


@pytest.mark.parametrize("during", ["prefill", "both"])
def test_tokens_equal_the_reference_pruned_at_the_same_chunks(
    during: str, engine: Any, greedy: Any, hf_model: Any
) -> None:
    evict = reference.streaming_llm(4, BUDGET, 32)

    def at_the_end(num_tokens: int, live: list[int], step: int) -> set[int]:
        return evict(num_tokens, live, step) if step == 0 else set()

    with engine(**ENGINE, **vtoken_args("streaming_llm", during)) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        assert observer.runtime.counters.invariants.violations == 0
        borders = {step for log in observer.logs() for step in log if step < 0}
    assert min(borders) < -4 * CHUNK
    expected = [
        reference.generate(
            hf_model,
            prompt,
            NUM_NEW,
            evict if during == "both" else at_the_end,
            chunk=CHUNK,
            evict_prompt=evict,
            draft=found,
        )
        for prompt, found in zip(PROMPTS, tokens, strict=True)
    ]
    assert tokens == expected
    # The eviction matters: pruning only in the decode phase gives different tokens.
    assert tokens[0] != reference.generate(hf_model, PROMPTS[0], NUM_NEW, evict, chunk=CHUNK)


@pytest.mark.parametrize("policy", ["h2o", "random"])
def test_scattered_victims_replay_whatever_the_placement(
    policy: str, engine: Any, greedy: Any, hf_model: Any
) -> None:
    runs = {}
    for name, config in VARIANTS.items():
        with engine(**ENGINE, **vtoken_args(policy, "both", **config)) as llm:
            observer = Observer(llm)
            tokens = greedy(llm, PROMPTS, NUM_NEW)
            runs[name] = tokens, observer.logs()
            assert (observer.runtime.counters.reclamation.relocations > 0) == (name != "naive")
    tokens, logs = runs["naive"]
    assert runs["plug"] == runs["pack"] == runs["naive"]
    for prompt, found, log in zip(PROMPTS, tokens, logs, strict=True):
        evict = reference.replay(log)
        assert found == reference.generate(
            hf_model, prompt, NUM_NEW, evict, chunk=CHUNK, evict_prompt=evict, draft=found
        )


def test_a_prompt_larger_than_the_free_pool_is_served_without_preemption(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    long = reference.random_prompt(1500, 7)
    evict = reference.streaming_llm(4, BUDGET, 32)
    expected = reference.generate(hf_model, long, 24, evict, chunk=CHUNK, evict_prompt=evict)
    prompts = [long, PROMPTS[1], long]
    for policy in ("streaming_llm", "random"):
        with engine(
            **ENGINE,
            num_gpu_blocks_override=51,  # 50 of 32 tokens and the null block
            max_model_len=1600,
            max_num_batched_tokens=512,
            **vtoken_args(policy, "both", low_watermark_blocks=1, headroom_blocks=2),
        ) as llm:
            observer = Observer(llm)
            found = greedy(llm, prompts, 24)
            counters = observer.runtime.counters
            assert counters.requests.preempted == 0
            assert counters.invariants.violations == 0
            at_once = max(map(sum, zip(*observer.held.values(), strict=False)))
            assert at_once < 50 < sum(-(-len(prompt) // 32) for prompt in prompts)
            if policy == "streaming_llm":  # the victims are the oldest: entire blocks die
                assert found[0] == found[2] == expected
            else:  # scattered victims: without relocation between the chunks it would not fit
                assert counters.reclamation.relocations > 0


def test_the_eviction_at_the_prompts_end_waits_a_token_for_scores_that_come_late(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    prompts = PROMPTS[1:]
    with (
        async_scheduling(),
        engine(enable_prefix_caching=False, **vtoken_args("tova", "prefill")) as llm,
    ):
        observer = Observer(llm)
        tokens = greedy(llm, prompts, 24)
        logs = observer.logs()
    assert [set(log) for log in logs] == [{1}, {1}]
    assert tokens == [
        reference.generate(hf_model, prompt, 24, reference.replay(log), draft=found)
        for prompt, log, found in zip(prompts, logs, tokens, strict=True)
    ]


@pytest.mark.parametrize("when", ["always", "pressure"])
def test_prompt_logprobs_equal_the_full_cache_whatever_evicts_between_chunks(
    when: str, engine: Any
) -> None:
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": PROMPTS[0]}] * 2
    scored = SamplingParams(
        temperature=0, max_tokens=2, prompt_logprobs=0, extra_args={"vtoken_report": 1}
    )
    plain = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    found, config = {}, {"evict_when": when, "headroom_blocks": 2, "low_watermark_blocks": 4}
    for policy in ("none", "streaming_llm"):
        args = vtoken_args(policy, "both", **config)
        with engine(**ENGINE, num_gpu_blocks_override=33, max_model_len=1024, **args) as llm:
            _, score = llm.generate(inputs, [plain, scored], use_tqdm=False)
            evicted = runtime_of(llm).counters.tokens.evicted
        tokens = zip(score.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)
        found[policy] = [row[token].logprob for row, token in tokens]
    assert evicted > 0  # of the other
    assert found["streaming_llm"] == pytest.approx(found["none"], abs=1e-4)
    assert score.kv_transfer_params["vtoken"]["evict_during"] == "decode"


def test_whatever_asks_for_log_probabilities_of_the_prompt_is_scored() -> None:
    """Every field of vLLM's that asks for them, and `echo` with `logprobs`."""
    from vllm import SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def asked(**fields: Any) -> SamplingParams:
        request = CompletionRequest(model="any", prompt="any", **fields)
        return request.to_sampling_params(8, {})

    fields = [
        name for name in SamplingParams.__struct_fields__ if name.startswith("prompt_logprob")
    ]
    fields.remove("prompt_logprob_start")  # says which rows, and asks for none
    values = {"prompt_logprobs": 0, "prompt_logprob_token_ids": [[1]]}
    assert sorted(fields) == sorted(values)
    assert all(scores_prompt(SamplingParams(**{name: values[name]})) for name in fields)
    assert scores_prompt(asked(echo=True, logprobs=0))
    assert scores_prompt(asked(prompt_logprobs=0))
    assert not any(
        map(scores_prompt, (asked(echo=True), asked(logprobs=1), SamplingParams(), None))
    )
