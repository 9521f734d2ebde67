"""vToken's engine on CUDA: the same tokens whatever reclamation does, with graphs and without.

A graph's replay computes what the same compiled code computes without graphs: dense, with holes,
relocated and recycled.

float32 with the Triton backend and greedy decoding. A request without holes is read in the order of
its slots, so relocation changes the last bits; Triton must not multiply in TF32, where it would
change a tenth of a percent and with it near ties between victims. The cache size is fixed, so that
several engines fit one device. Stock vLLM is one process; an engine with vToken goes from one
configuration to the next, with an empty prefix cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

SCRIPT = """
import json, os, sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vtoken.vllm import engine_args
from vllm import LLM, SamplingParams

model, configs, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
extra = {} if configs is None else engine_args(
    {"verify_ratio": 0.5}, experimental_cuda=True, check_every_step=True
)
llm = LLM(model, dtype="float32", max_model_len=1024, block_size=16, seed=0,
          num_gpu_blocks_override=512, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.05,
          attention_backend="TRITON_ATTN", **options, **extra)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
prompts = [{"prompt_token_ids": [(7 * i + j) % 120 + 3 for j in range(60 + 40 * i)]}
           for i in range(6)]
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=1)
found = {}
for name, config in (configs or {"stock": None}).items():
    if config is not None:
        scheduler.vtoken_controller.patch_config(config, actor="test")
        counters = scheduler.vtoken.counters
        evicted, moved = counters.tokens.evicted, counters.reclamation.moved_tokens
    assert llm.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found[name] = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [o.outputs[0].cumulative_logprob for o in outputs],
    }
    if config is not None:
        found[name]["evicted"] = counters.tokens.evicted - evicted
        found[name]["moved"] = counters.reclamation.moved_tokens - moved
print()
print(json.dumps(found))
"""
POLICIES = ("streaming_llm", "h2o", "scissorhands", "keydiff")
EVICTING: dict[str, Any] = {
    "budget_tokens": 64,
    "interval_tokens": 16,
    "evict_when": "always",
    "reclamation": "auto",
    "recycle": True,
    "theta_f": 0.25,
    "low_watermark_blocks": 64,
}
WAYS = {
    "naive": EVICTING | {"reclamation": "off"},
    "relocated": EVICTING | {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 500},
    "recycled": EVICTING,
}
CONFIGS: dict[str, Any] = {"dense": {"policy": {"name": "none"}}}
CONFIGS |= {
    f"{policy}, {way}": config | {"policy": {"name": policy}}
    for policy in POLICIES
    for way, config in WAYS.items()
}
OPTIONS: dict[str, dict[str, Any]] = {
    "graphs": {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}},
    "eager": {"enforce_eager": True},
}
SAME_CODE_WITHOUT_GRAPHS: dict[str, dict[str, Any]] = {
    "compilation_config": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "enforce_eager": {"enforce_eager": True},
}


def generate(model: Path, configs: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(configs), json.dumps(options)],
        env=os.environ
        | {"VTOKEN_ENABLED": "0" if configs is None else "1", "TRITON_F32_DEFAULT": "ieee"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()  # vLLM logs there too, also at its end
    return json.loads(next(line for line in lines if line.startswith('{"')))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(options, id=name, marks=pytest.mark.xdist_group(name))
        for name, options in OPTIONS.items()
    ],
)
def options(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def runs(demo_model: Path, options: dict[str, Any]) -> Any:
    return generate(demo_model, CONFIGS, options)


def test_without_eviction_the_tokens_are_stock_vllms(
    demo_model: Path, options: dict[str, Any], runs: Any
) -> None:
    assert runs["dense"]["tokens"] == generate(demo_model, None, options)["stock"]["tokens"]


@pytest.mark.parametrize("policy", POLICIES)
def test_reclamation_changes_no_token(runs: Any, policy: str) -> None:
    naive, relocated, recycled = (runs[f"{policy}, {way}"] for way in WAYS)
    assert relocated["tokens"] == naive["tokens"]
    assert recycled["tokens"] == naive["tokens"]
    assert naive["tokens"] != runs["dense"]["tokens"]  # eviction does change them
    assert naive["evicted"]
    assert relocated["moved"]
    assert not naive["moved"]


def test_an_engine_without_graphs_computes_the_same_bits(
    demo_model: Path, options: dict[str, Any], runs: Any
) -> None:
    """Of the eager engine: a second one does, so that a difference is the graphs'."""
    direct = generate(demo_model, CONFIGS, SAME_CODE_WITHOUT_GRAPHS[next(iter(options))])
    different = [
        name
        for name, found in runs.items()
        if any(found[what] != direct[name][what] for what in ("tokens", "logprobs"))
    ]
    assert not different
