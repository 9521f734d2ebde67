"""A trained model still finds needles after eviction, for any placement of K and V.

`vtoken bench grounds` measures the quality of policies; this is a regression test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, runtime_of, scheduler_of
from vtoken.wire import Guard
from vtoken.wire.commands import Command, PatchConfig
from vtoken_bench.forcing import ARGUMENT, PROCESSOR
from vtoken_bench.grounds.prompts import Prompt, PromptMaker

pytestmark = pytest.mark.vllm

LENGTH = 400  # of the text
NUM_PROMPTS = 4
KINDS = 4  # of facts in turn; the first are names, which the full cache always finds
KEEP = 1 / 3
ANSWER_TOKENS = 32
POLICY = "snapkv"  # the demo's
# Requests name their own policies and budgets.
CONFIG = {"policy": {"name": "none"}, "interval_tokens": 8, "evict_when": "always"}
LEAST_AGREEMENT = 0.9
EXACT = {POLICY: {}, "streaming_llm": {}}
EXACT_PROMPT, EXACT_BUDGET, EXACT_NEW = 160, 96, 35


@pytest.fixture(scope="module")
def llm(engine: Any, trained_model: Path) -> Iterator[Any]:
    args = engine_args(CONFIG, check_every_step=True)
    with engine(
        model=str(trained_model),
        max_model_len=1024,
        kv_cache_memory_bytes=6144 * 46_080,  # bytes a token: 30 layers, 3 heads of 64
        enable_prefix_caching=False,
        logits_processors=[PROCESSOR],
        **args,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def needles(llm: Any) -> list[Prompt]:
    """Prompts up to the beginning of the answer."""
    maker = PromptMaker(llm.get_tokenizer(), seed=0, num_tokens=LENGTH)
    return [maker.prompt("prefix", KINDS * number) for number in range(NUM_PROMPTS)]


def exact_variants(num_blocks: int) -> dict[str, dict[str, Any]]:
    """Ways to reclaim memory, each as a patch of the live configuration."""
    gates = {"theta_f": 0.25, "low_watermark_blocks": num_blocks // 8}
    eager = {"theta_f": 0.0, "low_watermark_blocks": num_blocks, "headroom_blocks": 2}
    plug, pack = (
        {"reclamation": "auto", "experiment": {"planner": name, "round_rule": "paper"}}
        for name in ("plug", "pack")
    )
    return {
        "naive-evict": gates | {"reclamation": "off", "recycle": False},
        "recycling": gates | plug | {"recycle": True},
        "plug": eager | plug | {"recycle": False},
        "pack": eager | pack | {"recycle": False, "headroom_blocks": 16},
    }


def completed(
    llm: Any, prompts: Sequence[Sequence[int]], num_new: int, arguments: list[dict[str, Any]]
) -> list[list[int]]:
    """Greedy tokens, all in one batch; `arguments` a prompt, as in `vllm_xargs`."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, extra_args=extra)
        for extra in arguments
    ]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_needles_are_found_when_two_thirds_of_the_cache_are_evicted(
    llm: Any, needles: list[Prompt]
) -> None:
    prompts = [needle.ids for needle in needles]
    evicting = [
        {"vtoken_policy": POLICY, "vtoken_budget_tokens": round(KEEP * len(ids))} for ids in prompts
    ]
    none = [{"vtoken_policy": "none"}] * len(prompts)
    found = completed(llm, prompts * 2, ANSWER_TOKENS, none + evicting)
    texts = [llm.get_tokenizer().decode(ids) for ids in found]
    scores = [n.fact.is_in(text) for text, n in zip(texts, needles * 2, strict=True)]
    full, evicted = scores[:NUM_PROMPTS], scores[NUM_PROMPTS:]
    assert sum(full) == NUM_PROMPTS, texts
    assert sum(evicted) >= NUM_PROMPTS - 1, texts
    assert runtime_of(llm).counters.tokens.evicted > NUM_PROMPTS * LENGTH * 0.6


def test_forced_tokens_are_the_output_and_the_log_probabilities_stay_the_models(
    llm: Any, needles: list[Prompt]
) -> None:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": needles[0].ids[:200]}
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    (free,) = llm.generate([prompt], plain, use_tqdm=False)
    own = list(free.outputs[0].token_ids)
    other = [own[0] + 1, *own[1:3]]

    def forced(tokens: list[int]) -> Any:
        params = plain.clone()
        params.extra_args = {ARGUMENT: tokens}
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

    same, changed = forced(own), forced(other)
    assert list(same.token_ids) == own
    for ours, theirs in zip(same.logprobs, free.outputs[0].logprobs, strict=True):
        assert {t: p.logprob for t, p in ours.items()} == pytest.approx(
            {t: p.logprob for t, p in theirs.items()}, abs=1e-4
        )
    assert list(changed.token_ids)[:3] == other
    # Of the first position nothing was forced before: the model's own choice is still first.
    first = changed.logprobs[0]
    assert first[own[0]].logprob == pytest.approx(free.outputs[0].logprobs[0][own[0]].logprob)
    assert first[own[0]].logprob > first[other[0]].logprob


@pytest.mark.parametrize("bad", [7, ["x"], [-2], [True]])
def test_invalid_forced_tokens_are_refused(llm: Any, bad: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError  # the server answers 400

    params = SamplingParams(max_tokens=1, extra_args={ARGUMENT: bad})
    with pytest.raises(VLLMValidationError, match=f"{ARGUMENT} is a list of token ids"):
        llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)


def test_tokens_do_not_depend_on_the_placement_of_keys_and_values(
    llm: Any, needles: list[Prompt], trained_model: Path
) -> None:
    """Reclamation moves and overwrites slots; one wrong bit changes a trained model's tokens.

    The reference is a pruned cache in Hugging Face transformers, from which the same tokens died.
    """
    from transformers import AutoModelForCausalLM

    scheduler = scheduler_of(llm)
    runtime = runtime_of(llm)
    prompt = needles[0].ids[:EXACT_PROMPT]
    arguments = [
        {
            "vtoken_policy": name,
            "vtoken_policy_params": json.dumps(params),
            "vtoken_budget_tokens": EXACT_BUDGET,
        }
        for name, params in EXACT.items()
    ]
    tokens, moved, recycled = {}, {}, {}
    observer = Observer(llm)
    for variant, patch in exact_variants(runtime.geometry.num_blocks - 1).items():
        reply = scheduler.vtoken_controller.handle(Command(call=PatchConfig(patch=patch)))
        assert reply.problem is None, reply.problem
        before = (
            runtime.counters.reclamation.relocations,
            runtime.counters.reclamation.recycled_slots,
        )
        tokens[variant] = completed(llm, [prompt] * len(EXACT), EXACT_NEW, arguments)
        moved[variant] = runtime.counters.reclamation.relocations - before[0]
        recycled[variant] = runtime.counters.reclamation.recycled_slots - before[1]
    observer.restore()
    assert [v for v, n in moved.items() if n] == ["plug", "pack"]
    assert [v for v, n in recycled.items() if n] == ["recycling"]
    for variant, found in tokens.items():
        assert found == tokens["naive-evict"], variant
    model = AutoModelForCausalLM.from_pretrained(trained_model, attn_implementation="eager").eval()
    for found, log in zip(tokens["naive-evict"], observer.logs(), strict=False):
        assert sum(map(len, log.values())) >= EXACT_PROMPT + EXACT_NEW - EXACT_BUDGET - 9
        assert found == reference.generate(
            model, prompt, EXACT_NEW, reference.replay(log), draft=found
        )
    assert tokens["naive-evict"][0] != tokens["naive-evict"][1]


def test_a_policy_that_costs_quality_is_taken_back_with_its_figures(llm: Any) -> None:
    """A trial on prose, whose guard reads the canaries' agreement."""
    num_passages, num_new = 6, 24
    runtime, scheduler = runtime_of(llm), scheduler_of(llm)
    prose = llm.get_tokenizer().encode(" ".join(topics[name] for name in sorted(topics)))
    passages = [prose[64 * n : 64 * (n + 1)] for n in range(num_passages)]
    change = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": 16,
        "interval_tokens": 0,
        "canary": {"share": 1.0, "control_share": 0.0},
    }
    guard = Guard(
        metric="canary_agreement{group=evicting}", below=LEAST_AGREEMENT, min_count=num_passages
    )
    call = PatchConfig(patch=change, guards=[guard])
    assert scheduler.vtoken_controller.handle(Command(call=call)).problem is None
    completed(llm, passages, num_new, [{}] * num_passages)
    while scheduler.has_unfinished_requests():  # the canaries
        llm.llm_engine.step()
    completed(llm, passages[:1], 2, [{}])  # a guard is evaluated before a step
    assert runtime.config.policy.name == "none"
    event = runtime.events.page(0, 10_000, "config").events[-1]
    assert event.data["actor"] == "guard"
    found = re.fullmatch(
        r"agreement (0\.\d+) ± 0\.\d+ < 0\.9 over 6 canaries", event.data["reason"]
    )
    assert found is not None, event.data["reason"]
    assert float(found[1]) < LEAST_AGREEMENT
    canary = scheduler.vtoken_controller.reporter.status().canary
    assert (canary.groups[0].policy, canary.failed) == ("streaming_llm", 0)
