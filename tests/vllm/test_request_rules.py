"""A request's own policy and budget, as the OpenAI API passes them to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, runtime_of

pytestmark = pytest.mark.vllm

NUM_NEW = 160
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((300, 120, 210))]
OWN: list[dict[str, Any] | None] = [
    {"vtoken_policy": "streaming_llm", "vtoken_budget_tokens": 96, "vtoken_interval_tokens": 0},
    None,
    {"vtoken_policy": "none"},
]


def test_each_request_runs_under_its_own_rules(engine: Any, hf_model: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    config = {
        "policy": {"name": "sliding_window"},
        "budget_tokens": 64,
        "evict_when": "always",
        "interval_tokens": 16,
    }
    with engine(**engine_args(config, check_every_step=True)) as llm:
        Observer(llm)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            [
                SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, extra_args=own)
                for own in OWN
            ],
            use_tqdm=False,
        )
        assert runtime_of(llm).requests.announced == {}  # forgotten with their requests
        for name, value, bound in (
            ("vtoken_budget_tokens", -1, "an integer in 1..16777216"),
            ("vtoken_report", 2, "one of 0, 1"),
            ("vtoken_report", "1", "one of 0, 1"),
        ):
            with pytest.raises(VLLMValidationError) as caught:
                llm.generate(
                    [{"prompt_token_ids": PROMPTS[0]}],
                    SamplingParams(extra_args={name: value}),
                    use_tqdm=False,
                )
            assert caught.value.parameter == name
            assert str(caught.value) == f"{name} = {value!r} is not {bound} (parameter={name})"
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    rules = [
        reference.streaming_llm(4, 96, 0),
        reference.sliding_window(64, 16),
        reference.full,
    ]
    assert tokens == [
        reference.generate(hf_model, prompt, NUM_NEW, evict, draft=found)
        for prompt, evict, found in zip(PROMPTS, rules, tokens, strict=True)
    ]
