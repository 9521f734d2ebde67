"""Stock vLLM equals the reference without vToken: the basis of every exactness test."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from tests.support import reference

pytestmark = pytest.mark.vllm

PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((40, 150, 300, 500))]
NUM_NEW = 320
# As vLLM loads a general plugin, in a process that fails where something imports vLLM.
LOADS = """
import sys
from importlib.metadata import entry_points
sys.modules["vllm"] = None
(plugin,) = entry_points(group="vllm.general_plugins", name="vtoken")
plugin.load()()
"""


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_in_plain_vllm_the_plugin_touches_nothing(
    enabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTOKEN_ENABLED", enabled)
    ran = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True)
    assert ("No module named 'vllm" in ran.stderr) == (ran.returncode == 1) == (enabled == "1")


def test_plain_vllm_serves_no_route_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins import load_endpoint_plugins

    assert "vtoken" in entry_points(group="vllm.endpoint_plugins").names
    for named, number in ((None, 0), ("another", 0), ("vtoken", 1)):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if named is not None:
            monkeypatch.setenv("VLLM_PLUGINS", named)
        assert len(load_endpoint_plugins(("generate",))) == number


def test_stock_vllm_equals_the_reference_token_for_token(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    with engine() as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        backends = {layer.attn_backend.__module__ for layer in layers}
        assert backends == {"vllm.v1.attention.backends.cpu_attn"}
        outputs = greedy(llm, PROMPTS, NUM_NEW)
    traces = [
        reference.trace(hf_model, prompt, NUM_NEW, reference.full, draft=found)
        for prompt, found in zip(PROMPTS, outputs, strict=True)
    ]
    assert outputs == [trace.tokens for trace in traces]
    assert min(trace.smallest_gap() for trace in traces) > 5e-4  # far above float32 rounding


def test_chunked_prefill_and_a_shared_prefix_change_no_token(engine: Any, greedy: Any) -> None:
    shared = [PROMPTS[3] + tail for tail in ([], PROMPTS[0], PROMPTS[1])]
    with engine(enable_prefix_caching=False) as llm:
        plain = greedy(llm, shared, 48)
    with engine(max_num_batched_tokens=128, max_num_seqs=8) as llm:
        greedy(llm, shared[:1], 1)
        assert greedy(llm, shared, 48) == plain
