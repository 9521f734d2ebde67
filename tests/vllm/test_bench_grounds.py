"""The grounds on a real engine: prompts for a real tokenizer, answers with a shared prefix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams

from vtoken.core.config import request_rules
from vtoken.core.config.spans import num_tokens
from vtoken.core.config.values import VTokenConfig
from vtoken.wire import Protect
from vtoken_bench import forcing
from vtoken_bench.engines import Engine
from vtoken_bench.forcing import FREE
from vtoken_bench.grounds.engines import Engines
from vtoken_bench.grounds.facts import FACTS
from vtoken_bench.grounds.prompts import CASES, Case, Prompt, PromptMaker
from vtoken_bench.grounds.settings import FULL, parsed, settings, with_tools
from vtoken_bench.grounds.tools import CALL, NUM_ROUNDS, NUM_TOOLS
from vtoken_bench.target import Target, model_folder
from vtoken_bench.vllm.forcing import ForcedTokens

pytestmark = pytest.mark.vllm

TOKENS = 1000  # bytes, with the demo model's tokenizer
TOOLS_TOKENS = 200  # beside the tools
MOST_TOKENS = 6000  # of a request
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
def tools_maker(model: Path) -> PromptMaker:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptMaker(tokenizer, seed=1, num_tokens=TOOLS_TOKENS)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[Engines]:
    started = Engines(model, Target(threads=1), count=1, num_tokens=3000, config={})
    with closing(started) as found:
        yield found


def decoded(maker: PromptMaker, ids: list[int]) -> str:
    return str(maker._tokenizer.decode(ids))


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("case", [case for case in CASES if case != "tools"])
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


def test_a_call_is_free_where_it_names_what_stands_in_its_schema_alone(
    tools_maker: PromptMaker,
) -> None:
    for number in range(8):
        prompt = tools_maker.prompt("tools", number)
        assert prompt == tools_maker.prompt("tools", number)
        text, fact = decoded(tools_maker, prompt.ids), prompt.fact
        assert text.endswith(f"{fact.question}<|im_end|>\n<|im_start|>assistant\n")
        assert text.count(f'{CALL}"name": "') == NUM_ROUNDS - 1
        ((start, end),) = prompt.parts.tools
        schemas = decoded(tools_maker, prompt.ids[start:end])
        assert schemas.count('"parameters": {') == NUM_TOOLS
        assert fact.statement in schemas
        assert all(text.count(f'"{name}"') == 1 for name in fact.gold)
        assert decoded(tools_maker, [prompt.ids[at] for at in prompt.answer]) == "".join(fact.gold)
        assert [at for at, token in enumerate(prompt.forced) if token == FREE] == prompt.free
        assert len(prompt.free) == len("".join(fact.gold))  # a token is a byte
        given = decoded(tools_maker, [token for token in prompt.forced if token != FREE])
        assert given.startswith(f'{fact.prefix}": ')
        assert fact.prefix.startswith(f'{CALL}"name": "')
        assert text.count(fact.prefix.split('"')[3]) == 1  # no call before the last has its name


# ---------------------------------------------------------------- answers


def alone(model: Path, requests: list[tuple[Prompt, dict[str, Any]]], num_new: int) -> list[Any]:
    """Outputs of an engine without a prefix cache and without a part of a chat that has tools, one
    request after the other; each request has a prompt and arguments.
    """
    args = Target(threads=1).engine_args(
        model,
        block_size=16,
        max_model_len=MOST_TOKENS,
        num_blocks=400,
        logits_processors=["vtoken_bench.vllm.forcing:ForcedTokens"],
    )
    engine = Engine("alone", {}, args, threads=1)
    try:
        load = [
            {
                "prompt": prompt.ids,
                "num_new": num_new + len(prompt.forced),
                "arguments": arguments | {"bench_forced": prompt.forced},
            }
            for prompt, arguments in requests
        ]
        spec = {"requests": load, "keep_tokens": True, "concurrency": 1, "natural_end": False}
        found: list[Any] = engine.ask(spec)["output_ids"]
    finally:
        engine.close()
    return found


def test_answers_with_a_shared_prefix_are_those_without(
    engines: Engines, maker: PromptMaker, model: Path
) -> None:
    found = [FULL, *settings([parsed(policy) for policy in POLICIES], [1 / 3])]
    questions = [(maker.prompt(case, 3), s) for case in ("chat", "later") for s in found]
    shared = engines.answers(questions, 24)
    requests = [(prompt, setting.arguments(len(prompt.ids))) for prompt, setting in questions]
    expected = [
        output[len(prompt.forced) :][: len(answer)]
        for output, (prompt, _), answer in zip(
            alone(model, requests, 24), questions, shared, strict=True
        )
    ]
    assert shared == expected  # a random model seldom ends its turn, but it may
    assert len({tuple(ids) for ids in shared}) > len(found)  # policies differ


def test_calls_are_those_of_an_engine_whose_requests_name_what_is_protected(
    model: Path, tools_maker: PromptMaker
) -> None:
    """There no template marks a part, so what a setting says is protected was protected in fact."""
    prompts = [tools_maker.prompt("tools", number) for number in range(3)]
    arms = [FULL, *with_tools(settings([parsed("streaming_llm")], [1 / 2]))]
    questions = [(prompt, setting) for setting in arms for prompt in prompts]
    started = Engines(
        model,
        Target(threads=1),
        count=1,
        num_tokens=MOST_TOKENS,
        config={},
        chat_template=tools_maker.tool_template,
    )
    with closing(started) as engines:
        calls = engines.answers(questions, 24)
    named = []
    for prompt, setting in questions:
        arguments = setting.arguments(len(prompt.ids), num_tokens(prompt.parts.tools))
        config = VTokenConfig(protect=Protect(tools=setting.protects_tools))
        rules = request_rules.request_rules(arguments)
        assert rules is not None
        rules.prompt = request_rules.Prompt(len(prompt.ids), partial(getattr, prompt, "parts"))
        if spans := rules.protection(config).spans():
            arguments["vtoken_budget_tokens"] = rules.under(config).budget_tokens
            arguments["vtoken_protect"] = json.dumps(spans)
        named.append((prompt, arguments))
    outputs = alone(model, named, 0)
    asked = [prompt for prompt, _ in questions]
    free = [[ids[at] for at in p.free] for p, ids in zip(asked, outputs, strict=True)]
    assert calls == free
    by_arm = [str(calls[n : n + len(prompts)]) for n in range(0, len(calls), len(prompts))]
    assert len({*by_arm}) == len(arms)  # what is protected matters


def test_forced_tokens_leave_free_what_is_free() -> None:
    params = SamplingParams(extra_args={forcing.ARGUMENT: [5, forcing.FREE, 6]})
    force = ForcedTokens.new_req_logits_processor(cast(Any, None), params)
    assert force is not None
    logits = torch.arange(8.0)
    chosen = [int(force([0] * number, logits.clone()).argmax()) for number in range(4)]
    assert chosen == [5, 7, 6, 7]
    with pytest.raises(ValueError, match=forcing.ARGUMENT):
        ForcedTokens.validate_params(SamplingParams(extra_args={forcing.ARGUMENT: [-2]}))
