"""The grounds on a real engine: prompts for a real tokenizer, answers with a shared prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams

from vtoken_bench import forcing
from vtoken_bench.engines import Engine
from vtoken_bench.grounds.engines import Engines
from vtoken_bench.grounds.facts import FACTS
from vtoken_bench.grounds.prompts import CASES, Case, Prompt, PromptMaker
from vtoken_bench.grounds.settings import FULL, Setting, parsed, settings
from vtoken_bench.target import Target, model_folder
from vtoken_bench.vllm.forcing import ForcedTokens

pytestmark = pytest.mark.vllm

TOKENS = 1000  # bytes, with the demo model's tokenizer
POLICIES = ["tova", "snapkv:window=16,pool_radius=3", "knorm", "h2o", "streaming_llm"]


@pytest.fixture(scope="module")
def model() -> Path:
    return model_folder("demo")


@pytest.fixture(scope="module")
def maker(model: Path) -> PromptMaker:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptMaker(tokenizer, seed=1, num_tokens=TOKENS)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[Engines]:
    started = Engines(model, Target(threads=1), count=1, num_tokens=3000, config={})
    with closing(started) as found:
        yield found


def decoded(maker: PromptMaker, ids: list[int]) -> str:
    return str(maker._tokenizer.decode(ids))


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_states_its_fact_and_ends_with_its_question(
    maker: PromptMaker, case: Case
) -> None:
    for number in range(8):
        prompt = maker.prompt(case, number)
        assert prompt == maker.prompt(case, number)
        text, forced = decoded(maker, prompt.ids), decoded(maker, prompt.forced)
        fact, whole = prompt.fact, text + forced
        assert whole.count(fact.statement) == 1
        spelled = decoded(maker, [prompt.ids[token] for token in prompt.answer])
        in_output = case == "long" and fact.statement in forced
        assert spelled == ("" if in_output else "".join(fact.gold))
        assert whole.count(fact.question) == 1
        if case in ("later", "long"):
            assert fact.question in forced
            assert fact.question not in text
        else:
            assert prompt.forced == []
        assert whole.endswith(fact.prefix) == (case == "prefix")


def test_half_of_the_long_outputs_state_the_fact_themselves(maker: PromptMaker) -> None:
    found = [maker.prompt("long", number) for number in range(16)]
    assert sum(prompt.answer == [] for prompt in found) == 8
    assert all(len(prompt.forced) > 512 for prompt in found)
    for prompt in found:
        whole = decoded(maker, prompt.ids + prompt.forced)
        assert whole.count(prompt.fact.statement.split(prompt.fact.gold[0])[0]) >= 1


def test_depths_and_kinds_are_spread_over_the_samples(maker: PromptMaker) -> None:
    found = [maker.prompt("chat", number) for number in range(24)]
    kinds = [prompt.fact.kind for prompt in found]
    assert all(kinds.count(kind) == 6 for kind in FACTS)
    depths = sorted(prompt.answer[0] / len(prompt.ids) for prompt in found)
    assert depths[0] < 0.25
    assert depths[-1] > 0.75
    assert max(b - a for a, b in pairwise(depths)) < 0.2


# ---------------------------------------------------------------- answers


def alone(model: Path, questions: list[tuple[Prompt, Setting]], num_new: int) -> list[Any]:
    """Outputs of an engine without a prefix cache, one request after the other."""
    args = Target(threads=1).engine_args(
        model,
        block_size=16,
        max_model_len=3000,
        num_blocks=400,
        logits_processors=["vtoken_bench.vllm.forcing:ForcedTokens"],
    )
    engine = Engine("alone", {}, args, threads=1)
    try:
        requests = [
            {
                "prompt": prompt.ids,
                "num_new": num_new + len(prompt.forced),
                "arguments": setting.arguments(len(prompt.ids)) | {"bench_forced": prompt.forced},
            }
            for prompt, setting in questions
        ]
        spec = {"requests": requests, "keep_tokens": True, "concurrency": 1}
        found = engine.ask(spec | {"natural_end": False})["output_ids"]
    finally:
        engine.close()
    lengths = [len(prompt.forced) for prompt, _ in questions]
    return [ids[length:] for ids, length in zip(found, lengths, strict=True)]


def test_answers_with_a_shared_prefix_are_those_without(
    engines: Engines, maker: PromptMaker, model: Path
) -> None:
    found = [FULL, *settings([parsed(policy) for policy in POLICIES], [1 / 3])]
    questions = [(maker.prompt(case, 3), s) for case in ("chat", "later") for s in found]
    shared = engines.answers(questions, 24)
    expected = alone(model, questions, 24)
    ends = [ids[: len(answer)] for ids, answer in zip(expected, shared, strict=True)]
    assert shared == ends  # a random model seldom ends its turn, but it may
    assert len({tuple(ids) for ids in shared}) > len(found)  # policies differ


def test_forced_tokens_leave_free_what_is_free() -> None:
    params = SamplingParams(extra_args={forcing.ARGUMENT: [5, forcing.FREE, 6]})
    force = ForcedTokens.new_req_logits_processor(cast(Any, None), params)
    assert force is not None
    logits = torch.arange(8.0)
    chosen = [int(force([0] * number, logits.clone()).argmax()) for number in range(4)]
    assert chosen == [5, 7, 6, 7]
    with pytest.raises(ValueError, match=forcing.ARGUMENT):
        ForcedTokens.validate_params(SamplingParams(extra_args={forcing.ARGUMENT: [-2]}))
