"""A trained model with windows beside full attention: Gemma 3 270M, a base model.

`test_hybrids.py` has tiny random models of every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer
from vtoken.demo.choice import AS_TEXT
from vtoken_bench.grounds.prompts import PromptMaker
from vtoken_bench.grounds.settings import parsed, settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTH = 900  # of the text
KEEP = 1 / 3
CONFIG = {"policy": {"name": "none"}, "evict_when": "always"}  # requests name their own
EXACT_PROMPT, EXACT_NEW = 540, 24  # the window has 512 tokens


@pytest.fixture(scope="module")
def llm(engine: Any, trained_hybrid: Path) -> Iterator[Any]:
    args = engine_args(CONFIG, check_every_step=True)
    with engine(
        model=str(trained_hybrid),
        max_model_len=1024,
        kv_cache_memory_bytes=6144 * 36_864,  # bytes a token: 18 layers, one head of 256
        **args,
    ) as llm:
        yield llm


def test_a_prompt_begins_with_bos_once_as_text_and_as_a_conversation(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    outputs = [
        *llm.generate(["The capital of France is"], params, use_tqdm=False),
        *llm.chat(messages, params, chat_template=AS_TEXT, use_tqdm=False),
    ]
    bos = llm.get_tokenizer().bos_token_id
    for output in outputs:
        assert output.prompt_token_ids[0] == bos
        assert output.prompt_token_ids.count(bos) == 1


def test_the_terms_of_use_stay_with_the_weights(trained_hybrid: Path) -> None:
    assert "Gemma Terms of Use" in (trained_hybrid / "GEMMA_TERMS.html").read_text()


def test_tokens_are_those_of_a_reference_without_the_victims(
    llm: Any, trained_hybrid: Path
) -> None:
    """The reference is transformers, in whose full layers the same tokens died."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    maker = PromptMaker(llm.get_tokenizer(), seed=0, num_tokens=LENGTH)
    prompt = maker.prompt("prefix", 0).ids[:EXACT_PROMPT]
    (keydiff,) = settings([parsed("keydiff")], [KEEP])
    params = SamplingParams(temperature=0, max_tokens=EXACT_NEW, ignore_eos=True)
    params.extra_args = keydiff.arguments(EXACT_PROMPT)
    observer = Observer(llm)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    observer.restore()
    tokens = list(output.outputs[0].token_ids)
    (log,) = observer.logs()
    assert sum(map(len, log.values())) > EXACT_PROMPT // 2
    model = AutoModelForCausalLM.from_pretrained(trained_hybrid, attn_implementation="eager").eval()
    evict = reference.replay(log)
    assert tokens == reference.generate(model, prompt, EXACT_NEW, evict, draft=tokens)
    assert tokens != reference.generate(model, prompt, EXACT_NEW, reference.full, draft=tokens)
