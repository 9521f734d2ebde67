"""Relocation changes logits by the order in which attention adds tokens up, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of
from vtoken.base.arrays import Ragged

pytestmark = pytest.mark.vllm

PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((150, 90, 120, 133))]
RECLAIMING = {"theta_f": 0.0, "low_watermark_blocks": 512, "headroom_blocks": 64}
Logits = list[list[tuple[int, float]]]  # of each request's tokens: the id and its log-probability


@pytest.fixture
def logits(engine: Any) -> Callable[..., Logits]:
    """`logits(dtype, **config)`: of greedy tokens under a policy that reads no scores."""

    def run(dtype: str, **config: Any) -> Logits:
        from vllm import SamplingParams

        policy = {"policy": {"name": "random"}, "budget_tokens": 64, "interval_tokens": 16}
        policy["evict_when"] = "always"
        arguments = engine_args({**policy, **config}, check_every_step=True)
        with engine(enable_prefix_caching=False, dtype=dtype, **arguments) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS],
                SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, logprobs=0),
                use_tqdm=False,
            )
            moved = runtime_of(llm).counters.reclamation.moved_tokens
            assert (moved > 0) == ("reclamation" not in config)
        return [
            [
                (token, found[token].logprob)
                for token, found in zip(o.token_ids, o.logprobs, strict=True)
            ]
            for o in (output.outputs[0] for output in outputs)
        ]

    return run


def read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads every request that has evicted by token ids, wherever its tokens are."""
    from vtoken.vllm.cpu import backend
    from vtoken.vllm.worker.executor import StepExecutor

    physical, plan_side_buffer = StepExecutor.physical, backend.plan_side_buffer

    def with_holes(self: StepExecutor, batch: Any) -> Any:
        plan = self.plan
        if plan is None:
            return physical(self, batch)
        count = len(plan.requests)
        not_dense, no_blocks = np.zeros(count, dtype=np.bool_), Ragged.empty(count)
        requests = replace(plan.requests, dense=not_dense, scratch=no_blocks)
        self.plan = replace(plan, requests=requests)
        try:
            return physical(self, batch)
        finally:
            self.plan = plan

    def token_by_token(requests: Any, *sizes: int) -> Any:
        # New tokens are copied one by one and in order: so all of them count as new.
        return plan_side_buffer(replace(requests, num_new=requests.slots.counts), *sizes)

    monkeypatch.setattr(StepExecutor, "physical", with_holes)
    monkeypatch.setattr(backend, "plan_side_buffer", token_by_token)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_relocation_changes_no_bit_of_a_logit_if_attention_reads_tokens_in_order(
    dtype: str, logits: Callable[..., Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert logits(dtype, **RECLAIMING) != logits(dtype, reclamation="off")
    read_in_order(monkeypatch)
    assert logits(dtype, **RECLAIMING) == logits(dtype, reclamation="off")
