"""Models with windows or states beside full attention, on the real engine: prefix hits, preemption,
relocation, and the rule on prefix hashes. `test_models.py` has the families.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import models, reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of

pytestmark = pytest.mark.vllm

BUDGET, INTERVAL, SINKS = 40, 12, 4
NUM_NEW = 48
POLICY = {"name": "streaming_llm", "params": {"sinks": SINKS}}
EVICT = reference.streaming_llm(SINKS, BUDGET, INTERVAL)
RELOCATING = {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 15, "batch_size": 15}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(models.MIXED["gpt_oss"], tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = models.HYBRID["granitemoehybrid"]
    return models.make(recipe, tmp_path_factory.mktemp("granite"))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def settings(folder: Path, config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    values = {"policy": POLICY, "budget_tokens": BUDGET, "interval_tokens": INTERVAL, **config}
    return {
        "model": str(folder),
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        **overrides,
        **engine_args(values | {"verify_ratio": 1.0}, check_every_step=True),
    }


def cached_tokens(llm: Any, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], int]:
    """The greedy outputs, and the prompts' tokens that were found in the prefix cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = llm.generate(inputs, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in found], sum(o.num_cached_tokens for o in found)


@pytest.mark.parametrize("config", [{}, RELOCATING], ids=["recycled", "relocated"])
def test_prompts_found_in_the_cache_are_pruned_exactly(
    engine: Any, gpt_oss: Path, config: dict[str, Any]
) -> None:
    shared = reference.random_prompt(128, 1)
    prompts = [shared + reference.random_prompt(9 + 30 * i, 20 + i)[1:] for i in range(3)]
    with engine(**settings(gpt_oss, config, block_size=16, num_gpu_blocks_override=600)) as llm:
        first, _ = cached_tokens(llm, prompts, NUM_NEW)
        again, hits = cached_tokens(llm, prompts, NUM_NEW)
        counters = runtime_of(llm).counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 3 * len(shared)
        assert (
            counters.reclamation.relocations if config else counters.reclamation.recycled_slots
        ) > 0
    assert hits >= 2 * len(shared)
    model = loaded(gpt_oss)
    assert first == again
    assert first == [reference.generate(model, prompt, NUM_NEW, EVICT) for prompt in prompts]


@pytest.mark.parametrize("family", ["gpt_oss", "granite"])
def test_a_preempted_request_is_computed_again_in_all_groups(
    engine: Any, request: pytest.FixtureRequest, family: str
) -> None:
    from vllm import SamplingParams

    folder: Path = request.getfixturevalue(family)
    prompts = [reference.random_prompt(70 + 17 * i, 20 + i) for i in range(4)]
    pool: dict[str, Any] = {"num_gpu_blocks_override": 600, "block_size": 16}
    if family == "granite":  # vLLM's CPU kernel of Mamba 2 fails with a prefix cache
        pool = {"num_gpu_blocks_override": 64, "block_size": None, "enable_prefix_caching": False}
    answers: dict[int, list[int]] = {}
    with engine(**settings(folder, RELOCATING, **pool)) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for _ in range(25):
            llm.llm_engine.step()
        assert scheduler.vtoken.counters.tokens.evicted > 0
        cuts = [r.num_output_tokens for r in sorted(scheduler.running, key=_number)]
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        counters = runtime_of(llm).counters
        assert (counters.requests.preempted, counters.invariants.violations) == (len(prompts), 0)
    model = loaded(folder)
    for number, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True)):
        tokens = reference.generate(model, prompt, cut, EVICT)
        tokens += reference.generate(model, prompt + tokens, NUM_NEW - cut, EVICT)
        assert answers[number] == tokens


def _number(request: Any) -> int:
    return int(request.request_id.split("-")[0])


@pytest.fixture
def combined(engine: Any, gpt_oss: Path) -> Iterator[Any]:
    """`combined(llm)`: see `test_no_group_is_hashed_after_an_eviction`."""
    prompt = reference.random_prompt(150, 7)
    values = {"policy": {"name": "none"}}
    kept: dict[str, Any] = {"block_size": 16, "prefix_cache_retention_interval": None}
    with engine(**settings(gpt_oss, values, num_gpu_blocks_override=600, **kept)) as llm:

        def run() -> tuple[list[int], list[int], int]:
            own = {"vtoken_policy": "streaming_llm", "vtoken_budget_tokens": BUDGET}
            from vllm import SamplingParams

            params = SamplingParams(
                temperature=0, max_tokens=106, ignore_eos=True, detokenize=False, extra_args=own
            )
            (out,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            longer = prompt + list(out.outputs[0].token_ids)
            cached_tokens(llm, [longer], 1)  # clean blocks of the managed group
            (answer,), hits = cached_tokens(llm, [[*longer, 65]], NUM_NEW)
            return [*longer, 65], answer, hits

        yield llm, run


def test_no_group_is_hashed_after_an_eviction(
    combined: Any, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request evicts and writes 106 tokens; a second computes the same tokens with full
    attention; a third finds them in the cache. Its windows must be those of the second.
    """
    llm, run = combined
    prompt, answer, hits = run()
    assert hits >= 240
    wanted = reference.generate(loaded(gpt_oss), prompt, NUM_NEW, reference.full)
    assert answer == wanted

    coordinator = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator
    stock, managed = type(coordinator).__mro__[2].cache_blocks, coordinator.managed
    hash_own = managed.cache_blocks

    def hash_windows(request: Any, num_computed_tokens: int) -> None:
        """The rule for the managed group alone."""
        truncated = managed.is_truncated(request.request_id)
        managed.cache_blocks = (lambda *_, **__: None) if truncated else hash_own
        stock(coordinator, request, num_computed_tokens)

    assert llm.reset_prefix_cache()
    monkeypatch.setattr(coordinator, "cache_blocks", hash_windows)
    again, polluted, hits = run()
    assert again == prompt
    assert hits >= 240
    assert polluted != wanted
