"""Protected spans on the real engine: greedy tokens against the reference, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, runtime_of

pytestmark = pytest.mark.vllm

NUM_NEW = 160
BUDGET, INTERVAL, SINKS = 96, 16, 4
LONG = "A list of things to keep in mind, none of which is of any use here. " * 4
CHAT = [
    {"role": "system", "content": "You answer in one word, and you never say why."},
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Is it so?"},
]
CONFIG = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": BUDGET,
    "evict_when": "always",
    "interval_tokens": INTERVAL,
}
PLAIN = reference.random_prompt(300, 1)


@pytest.fixture(scope="module")
def llm(engine: Any) -> Any:
    args = engine_args(CONFIG | {"verify_ratio": 1.0}, check_every_step=True)
    with engine(enable_prompt_embeds=True, **args) as made:
        yield made


def generate(llm: Any, prompts: list[Any], arguments: list[dict[str, Any] | None]) -> list[Any]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, extra_args=own)
        for own in arguments
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_equal_the_reference_that_keeps_the_spans(llm: Any, hf_model: Any) -> None:
    """Parts that the engine finds in a chat, spans that a client names, a share as the budget."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_model.name_or_path)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    chat = tokenizer.encode(text, add_special_tokens=False)
    observer = Observer(llm)
    try:
        tokens = generate(
            llm,
            [{"prompt_token_ids": prompt} for prompt in (chat, PLAIN, PLAIN)],
            [
                None,
                {"vtoken_protect": "[[40, 60], [200, 203]]"},
                {"vtoken_budget_ratio": 0.5, "vtoken_protect": [7, 8]},
            ],
        )
        logs = observer.logs()
    finally:
        observer.restore()
    assert runtime_of(llm).counters.invariants.violations == 0
    assert all(len(log) > 2 for log in logs)
    # One byte a token; of the chat everything up to the first user turn, and the last header. The
    # system prompt is shortened: parts take a quarter of what the policy does not need itself.
    answer = text.rindex("assistant:")
    header = range(answer - text.index("system") + 1, len(chat))
    head = range((BUDGET - SINKS - 1) // 4 - len("assistant: "))
    spans = [{*head, *header}, {*range(40, 60), *range(200, 203)}, {7}]
    budgets = [BUDGET, BUDGET, 256]  # the floor
    prompts = (chat, PLAIN, PLAIN)
    for prompt, kept, budget, found in zip(prompts, spans, budgets, tokens, strict=True):
        evict = reference.streaming_llm(SINKS, budget - len(kept), INTERVAL)
        evict = reference.protecting(kept, evict)
        assert found == reference.generate(hf_model, prompt, NUM_NEW, evict, draft=found)


def test_spans_that_leave_the_prompt_fail_that_request_alone(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    refusal = r"vtoken_protect = \[299, 301\] leaves the prompt of 300 tokens"
    with pytest.raises(VLLMValidationError, match=refusal) as caught:
        generate(llm, [{"prompt_token_ids": PLAIN}], [{"vtoken_protect": [299, 301]}])
    assert caught.value.parameter == "vtoken_protect"
    assert len(generate(llm, [{"prompt_token_ids": PLAIN}], [{"vtoken_protect": [299, 300]}])) == 1


def test_a_policy_that_reads_words_is_refused_for_a_prompt_of_embeddings(
    llm: Any, hf_model: Any
) -> None:
    import torch
    from vllm.exceptions import VLLMValidationError

    with torch.no_grad():
        embeds = hf_model.get_input_embeddings()(torch.tensor(PLAIN))
    with pytest.raises(VLLMValidationError, match="embeddings") as caught:
        generate(llm, [{"prompt_embeds": embeds}], [{"vtoken_policy": "fastgen"}])
    assert caught.value.parameter == "vtoken_policy"
    tokens = generate(llm, [{"prompt_embeds": embeds}], [{"vtoken_protect": [40, 60]}])
    kept = set(range(40, 60))
    evict = reference.streaming_llm(SINKS, BUDGET - len(kept), INTERVAL)
    assert tokens == [
        reference.generate(hf_model, PLAIN, NUM_NEW, reference.protecting(kept, evict))
    ]
