"""The text of a request on a real engine: decoded by the tokenizer, with flags of the table."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.support.engines import engine_args
from tests.support.observe import scheduler_of
from vtoken import wire
from vtoken_api.text import RequestTexts
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

PROMPT = "Old tokens die, é and 日本 too. " * 4
CONFIG = {
    "policy": {"name": "h2o", "params": {"sinks": 4}},
    "shadow": {"name": "streaming_llm"},
    "budget_tokens": 96,
    "evict_when": "always",
    "interval_tokens": 8,
}


def text_of(llm: Any) -> tuple[Any, wire.TextPage]:
    """The only request, as the scheduler has it, and its text."""
    scheduler = scheduler_of(llm)
    (request,) = scheduler.requests.values()
    source = scheduler.vtoken_controller.reporter.text(request.request_id, 0, 4096)
    return request, RequestTexts(llm.get_tokenizer).decode(source)


@pytest.mark.parametrize("overlap", [False, True])
def test_text_is_what_the_tokenizer_decodes_and_flags_are_the_token_table(
    engine: Any, *, overlap: bool
) -> None:
    from vllm import SamplingParams

    steps = async_scheduling() if overlap else nullcontext()
    with steps, engine(**engine_args(CONFIG)) as llm:
        tokenizer = llm.get_tokenizer()
        params = SamplingParams(
            temperature=0,
            max_tokens=60,
            ignore_eos=True,
            extra_args={"vtoken_protect": [0, 4]},
        )
        words = tokenizer.encode(PROMPT)
        llm.llm_engine.add_request("a", {"prompt_token_ids": words}, params)
        compared = 0
        for _ in range(40):
            llm.llm_engine.step()
            request, page = text_of(llm)
            table = scheduler_of(llm).vtoken.tables[request.request_id]
            known = list(request.all_token_ids)
            assert page.prompt_tokens == len(words)
            assert page.total == min(table.num_tokens, len(known)) == len(page.rows)
            assert "".join(row.text or "" for row in page.rows) == tokenizer.decode(
                known[: page.total]
            )
            assert [row.token_id for row in page.rows if row.live] == [
                n for n in table.live_ids().tolist() if n < page.total
            ]
            assert [row.token_id for row in page.rows if row.protected] == [0, 1, 2, 3]
            compared += page.shadow is not None
        assert len(known) > len(words) + 30
        assert compared > 20
        assert any(row.score is not None for row in page.rows)


def test_a_prompt_given_as_embeddings_has_no_text(engine: Any) -> None:
    import torch
    from vllm import SamplingParams

    with engine(enable_prompt_embeds=True, **engine_args(CONFIG)) as llm:
        width = llm.llm_engine.model_config.get_hidden_size()
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        llm.llm_engine.add_request("a", {"prompt_embeds": torch.zeros(12, width)}, params)
        for _ in range(6):
            llm.llm_engine.step()
        request, page = text_of(llm)
        assert [row.text for row in page.rows[:12]] == [None] * 12
        output = list(request.all_token_ids)[12 : page.total]
        assert len(output) > 3
        text = "".join(row.text or "" for row in page.rows)
        assert text == llm.get_tokenizer().decode(output)
