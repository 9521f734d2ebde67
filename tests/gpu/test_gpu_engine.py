"""vToken's engine on CUDA: the same tokens whatever reclamation does, with graphs and without.

float32 with the Triton backend and greedy decoding: only the placement differs, and its rounding is
far below the distance between the best two tokens. The cache size is fixed, so that several engines
fit one device; equal runs are made once a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

SCRIPT = """
import json, sys
from vtoken.vllm import engine_args
from vllm import LLM, SamplingParams

model, config, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
extra = {} if config is None else engine_args(
    config | {"verify_ratio": 0.5}, experimental_cuda=True, check_every_step=True
)
llm = LLM(model, dtype="float32", max_model_len=1024, block_size=16, seed=0,
          num_gpu_blocks_override=512, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.05,
          attention_backend="TRITON_ATTN", **options, **extra)
prompts = [{"prompt_token_ids": [(7 * i + j) % 120 + 3 for j in range(60 + 40 * i)]}
           for i in range(6)]
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
tokens = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
print()
print(json.dumps(tokens))
"""
POLICIES = ("streaming_llm", "h2o", "scissorhands", "keydiff")
EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 64,
    "interval_tokens": 16,
    "evict_when": "always",
}
NAIVE = EVICTING | {"reclamation": "off"}
EAGER = EVICTING | {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 500}
EAGERLY: dict[str, Any] = {"enforce_eager": True}


def generate(model: Path, config: Any, options: dict[str, Any]) -> Any:
    return _generate(model, json.dumps(config), json.dumps(options))


@cache
def _generate(model: Path, config: str, options: str) -> Any:
    environment = {**os.environ}
    if config == "null":
        environment.pop("VTOKEN_ENABLED", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), config, options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_without_eviction_the_tokens_are_stock_vllms(demo_model: Path) -> None:
    assert generate(demo_model, {}, {}) == generate(demo_model, None, {})


@pytest.mark.parametrize("options", [{}, EAGERLY], ids=["graphs", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_reclamation_changes_no_token(
    demo_model: Path, options: dict[str, Any], policy: str
) -> None:
    chosen = {"policy": {"name": policy}}
    naive = generate(demo_model, NAIVE | chosen, options)
    assert generate(demo_model, EAGER | chosen, options) == naive
    assert generate(demo_model, EVICTING | chosen, options) == naive
    assert naive != generate(demo_model, {}, options)  # eviction does change them
