"""A shadow policy on a real engine: it reads its own signals and changes no token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, scheduler_of

pytestmark = pytest.mark.vllm

NUM_NEW = 40
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((300, 90))]
CHUNKS = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True}
CONFIG = {
    "policy": {"name": "h2o"},
    "budget_tokens": 72,
    "evict_when": "always",
    "interval_tokens": 4,
    "theta_f": 0.0,
    "low_watermark_blocks": 500,
}


def test_tokens_and_victims_are_the_same_whatever_the_shadow(engine: Any, greedy: Any) -> None:
    """Attention and key signals besides those of the policy, in prompt chunks and decode."""
    runs = {}
    with engine(enable_prefix_caching=False, **CHUNKS, **engine_args(CONFIG)) as llm:
        control = scheduler_of(llm).vtoken_controller
        for name in ("none", "tova", "snapkv", "scissorhands", "keydiff"):
            control.patch_config({"shadow": {"name": name}})
            observer = Observer(llm)
            tokens = greedy(llm, PROMPTS, NUM_NEW)
            runs[name] = tokens, observer.logs()
            observer.restore()
            shadow = control.reporter.status().shadow
            if name == "none":
                assert shadow is None
                continue
            assert (shadow.policy.name, shadow.error) == (name, None)
            assert shadow.compared + shadow.waiting == sum(map(len, runs[name][1])) > 10
            assert shadow.waiting == 0
            assert 0 < shadow.agreed < shadow.victims
    for name, run in runs.items():
        assert run == runs["none"], f"shadow {name}"
