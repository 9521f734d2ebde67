"""Beam search: vLLM makes one request of each beam and each token, so a beam's prompt is pruned
anew in every step if prompts are evicted from, and nothing is evicted otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of

pytestmark = pytest.mark.vllm

BUDGET, INTERVAL, SINKS, CHUNK = 40, 8, 4, 64
WIDTH, NUM_NEW = 2, 8
PROMPT = reference.random_prompt(150, 3)
POLICY = {
    "policy": {"name": "streaming_llm", "params": {"sinks": SINKS}},
    "budget_tokens": BUDGET,
    "evict_when": "always",
    "interval_tokens": INTERVAL,
    "verify_ratio": 1.0,
}
Beams = list[tuple[list[int], float]]


def searched(llm: Any) -> Beams:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=WIDTH, max_tokens=NUM_NEW, ignore_eos=True)
    (output,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    return [(list(beam.tokens), beam.cum_logprob) for beam in output.sequences]


def reference_beams(model: Any, evict_prompt: reference.Evict) -> Beams:
    """Beam search in which each beam's logits are those of a prompt in chunks, without a cache."""
    beams: Beams = [(PROMPT, 0.0)]
    for _ in range(NUM_NEW):
        longer: Beams = []
        for tokens, total in beams:
            trace = reference.trace(
                model, tokens, 1, reference.full, chunk=CHUNK, evict_prompt=evict_prompt
            )
            best = torch.log_softmax(trace.logits[0], dim=-1).topk(2 * WIDTH)
            values, ids = best.values.tolist(), best.indices.tolist()
            longer += [([*tokens, i], total + v) for i, v in zip(ids, values, strict=True)]
        beams = sorted(longer, key=lambda beam: beam[1], reverse=True)[:WIDTH]
    return beams


@pytest.mark.parametrize("evict_during", ["decode", "prefill"])
def test_beams_equal_the_reference(engine: Any, hf_model: Any, evict_during: str) -> None:
    with engine(
        block_size=16,
        num_gpu_blocks_override=128,
        max_model_len=256,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=1,  # so that every chunk of a beam has the same length
        enable_prefix_caching=False,
        **engine_args(POLICY | {"evict_during": evict_during}, check_every_step=True),
    ) as llm:
        beams = searched(llm)
        counters = runtime_of(llm).counters
        assert counters.invariants.violations == 0
        assert (counters.tokens.evicted > 0) == (evict_during == "prefill")
        assert (counters.reclamation.relocations > 0) == (evict_during == "prefill")
    evict = reference.streaming_llm(SINKS, BUDGET, INTERVAL)
    wanted = reference_beams(hf_model, evict if evict_during == "prefill" else reference.full)
    assert [tokens for tokens, _ in beams] == [tokens for tokens, _ in wanted]
    for (_, found), (_, expected) in zip(beams, wanted, strict=True):
        assert math.isclose(found, expected, abs_tol=1e-3)
