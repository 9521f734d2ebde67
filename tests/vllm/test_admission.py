"""Admission on the real scheduler: what is admitted is not preempted later."""

from __future__ import annotations

from typing import Any

import pytest
import reference
from observe import Observer

from vtoken.vllm import engine_args

pytestmark = pytest.mark.vllm


def test_compressed_admission_preempts_nobody_where_vllms_rule_does(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    prompts = [reference.random_prompt(60 + 3 * i, 30 + i) for i in range(8)]
    preempted, tokens = {}, {}
    for admission in ("stock", "compressed"):
        config = {
            "policy": {"name": "streaming_llm"},
            "budget_tokens": 128,
            "interval_tokens": 0,
            "headroom_blocks": 2,
            "admission": admission,
        }
        with engine(
            enable_prefix_caching=False,
            num_gpu_blocks_override=26,
            max_model_len=768,
            max_num_batched_tokens=512,
            **engine_args(config, check_every_step=True),
        ) as llm:
            observer = Observer(llm)
            tokens[admission] = greedy(llm, prompts, 200)
            preempted[admission] = observer.runtime.counters.preemptions
    assert preempted["stock"] > 0
    assert preempted["compressed"] == 0
    evict = reference.streaming_llm(4, 128, 0)
    for prompt, found in zip(prompts[::3], tokens["compressed"][::3], strict=True):
        assert found == reference.generate(hf_model, prompt, 200, evict)
