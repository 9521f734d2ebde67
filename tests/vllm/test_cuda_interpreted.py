"""The CUDA worker in vLLM's Model Runner V2 on the CPU, with Triton's kernels in its interpreter.

These tests check the logic: vLLM's own Triton attention at page size 1, and an engine whose tokens
and victims equal those of the CPU worker. Tests of CUDA itself are marked `gpu` in tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import interpreted, models
from tests.support.engines import engine_args
from tests.support.replayed import MISTAKES
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
NONE = {"policy": {"name": "none"}}  # until a scenario chooses


def run_process(*command: str, **environment: str) -> Any:
    """The JSON document on the last lines of `python COMMAND`; fails with its stderr."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("\n{") :])


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer whose window is one block, and a layer of full attention."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = layers | {"sliding_window": 16, "head_dim": 32}
    recipe = models.Recipe("ministral", config, architecture="MinistralForCausalLM")
    return models.make(recipe, tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layers of full attention; the demo model has four, which take longer."""
    return models.make(models.SERVED["llama"], tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def result(plain: Path, windowed: Path) -> Any:
    return run_process("-m", "tests.support.interpreted", str(plain), str(windowed))


@pytest.fixture(scope="module")
def on_cpu(engine: Any, plain: Path) -> Any:
    """The same requests on the CPU worker, which has other kernels and packs holes."""
    settings = interpreted.ENGINE | {"model": str(plain)}
    with async_scheduling(), engine(**settings, **engine_args(NONE)) as llm:
        return interpreted.play(llm, interpreted.SCENARIOS)


@pytest.fixture(scope="module")
def on_cpu_windowed(engine: Any, windowed: Path) -> Any:
    settings = interpreted.WINDOWED | {"model": str(windowed)}
    with async_scheduling(), engine(**settings, **engine_args(NONE)) as llm:
        return interpreted.play(llm, interpreted.WITH_WINDOWS)


def test_vllm_triton_attention_at_page_size_one_equals_the_oracle(result: Any) -> None:
    attention = result["attention"]
    assert attention["max_error"] < 1e-5
    assert attention["max_error_damaged"] > 1e-3  # one wrong page is detected


def test_its_output_is_bit_for_bit_the_same_for_any_token_placement(result: Any) -> None:
    assert result["attention"]["equal_when_moved"]
    assert result["attention"]["equal_to_block_size"]


def test_what_runs_is_vllms_model_runner_v2_with_asynchronous_scheduling(result: Any) -> None:
    played = result["played"]
    bases = ["vllm.v1.worker.cpu.model_runner.CPUModelRunner"]
    bases += ["vllm.v1.worker.gpu.model_runner.GPUModelRunner"]
    mixin = "vtoken.vllm.cuda.runner.VTokenV2Mixin"
    assert [name for name in played["runner"] if name in [mixin, *bases]] == [mixin, *bases]
    assert played["scheduled_asynchronously"]


@pytest.mark.parametrize("name", interpreted.SCENARIOS)
def test_every_request_gets_the_cpu_workers_tokens_and_loses_its_victims(
    result: Any, on_cpu: Any, name: str
) -> None:
    found, expected = result["played"]["scenarios"][name], on_cpu[name]
    for fact in ("tokens", "victims", "shadow", "cached", "preempted"):
        assert found[fact] == expected[fact], fact
    assert found["violations"] == 0


def test_every_scenario_reaches_what_it_is_named_for(result: Any) -> None:
    found = result["played"]["scenarios"]
    assert found["dense"]["steps_with_holes"] == 0
    assert found["dense"]["victims"] == []
    assert found["holes"]["steps_with_holes"] > 0
    assert found["holes"]["moved_tokens"] == found["holes"]["recycled_slots"] == 0
    for name in ("relocated", "prefix hits", "chunks"):
        assert found[name]["moved_tokens"] > 0
        assert found[name]["verified"] > 0
    assert found["recycled"]["recycled_slots"] > 0
    assert found["parked"]["restored_tokens"] == found["parked"]["parked_tokens"] > 0
    assert max(found["prefix hits"]["cached"]) > 0
    assert any(tokens < 40 for tokens, _ in found["chunks"]["victims"])  # within a prompt
    assert found["preempted"]["preempted"] > 0
    assert found["preempted"]["swapped_requests"] == 0
    assert found["swapped"]["swapped_requests"] == found["swapped"]["preempted"] > 0
    assert len(found["signals"]["victims"]) >= 3
    compared, agreed = found["signals"]["shadow"]
    assert agreed > 0
    assert compared > 0
    assert result["played"]["probed_singles"] > 0


def test_a_model_with_windows_gets_the_cpu_workers_tokens(
    result: Any, on_cpu_windowed: Any
) -> None:
    """Two groups of layers: the row of the managed one is replaced, the other one's stays."""
    assert result["windowed"]["groups"] == 2
    for name, expected in on_cpu_windowed.items():
        found = result["windowed"]["scenarios"][name]
        assert found["tokens"] == expected["tokens"]
        assert found["victims"] == expected["victims"] != []
        assert found["violations"] == 0
    assert result["windowed"]["scenarios"]["relocated"]["moved_tokens"] > 0


def test_in_every_step_copies_precede_vllms_writes_and_the_forward_waits(result: Any) -> None:
    """The order of calls in V2 itself, of every step of every scenario."""
    steps = [step["calls"] for step in result["played"]["steps"] if "uniform" in step]
    inner = ["finish_requests", "update_requests", "prepare_attn", "guard", "forward"]
    inner += ["forward_ended", "sample_tokens"]
    seen = set()
    for calls in steps:
        copied = "launch" in calls
        seen.add(copied)
        if copied:
            launches = [i for i, call in enumerate(calls) if call == "launch"]
            assert calls.index("finish_requests") < launches[0]
            assert launches[-1] < calls.index("update_requests")
        rest = [c for c in calls if c != "launch"]
        before = rest.index("update_requests")  # reading contents back waits too
        assert rest[:1] + [c for c in rest[1:before] if c != "guard"] == inner[:1]
        after = [c for c in rest[before:] if c != "guard"]
        assert after == [c for c in inner[1:] if c != "guard"]
        assert rest[rest.index("prepare_attn") + 1] == "guard"
    assert seen == {False, True}


def test_full_graphs_replay_every_decode_unless_they_lack_the_queries_of_a_probed_layer(
    result: Any,
) -> None:
    """V2's own choice in every step of every scenario; what a graph replays is its capture's."""
    steps = [step for step in result["played"]["steps"] if "uniform" in step]
    seen = set()
    for step in steps:
        is_replayed = step.get("replayed", False)
        assert is_replayed == (step["uniform"] == 1)
        assert not (is_replayed and step["leaves"])
        assert step["probed"] or not step["leaves"]
        seen.add((is_replayed, step["probed"], step.get("holes", False)))
    assert seen >= {(True, probed, holes) for probed in (False, True) for holes in (False, True)}
    assert (False, True, True) in seen


@pytest.mark.parametrize("name", MISTAKES)
def test_control_what_a_captured_graph_does_not_see_is_noticed(
    result: Any, on_cpu: Any, name: str
) -> None:
    assert result["mistakes"][name] != on_cpu[interpreted.WITH_MISTAKES]["tokens"]


def test_a_benchmark_forces_tokens_under_v2_and_gets_the_models_own_probabilities(
    result: Any,
) -> None:
    tokens, logprobs = zip(*result["played"]["forced"], strict=True)
    assert tokens[:3] == (9, 8, 7)
    assert all(logprob < 0.0 for logprob in logprobs[:3])


def test_the_worker_forgets_requests_that_ended(result: Any) -> None:
    *_, (_, last) = interpreted.SCENARIOS.values()
    assert result["played"]["known_requests"] <= sum(map(len, last))
