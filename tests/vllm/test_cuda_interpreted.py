"""The CUDA worker in vLLM's engine on the CPU, with Triton's kernels in its interpreter.

These tests check the logic: vLLM's own Triton attention at page size 1, and an engine whose tokens
equal those of the CPU worker. Tests of CUDA itself are marked `gpu` in tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import interpreted
from tests.support.engines import engine_args
from tests.support.observe import runtime_of

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 24,
    "interval_tokens": 4,
}
NAIVE = EVICTING | {"reclamation": "off"}
READING = {  # the policy reads attention, its shadow keys; both layers count
    "policy": {"name": "h2o"},
    "shadow": {
        "name": "keydiff",
        "params": {"recent": 1, "heads": "mean", "pool_radius": 0},
    },
    "budget_tokens": 24,
    "interval_tokens": 1,
    "probe": {"layers": [0, 1]},
    "recycle": False,
    "theta_f": 0.0,
    "low_watermark_blocks": 16,
}
EAGER = EVICTING | {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 16}


def run_process(*command: str, **environment: str) -> Any:
    """The JSON document on the last lines of `python COMMAND`; fails with its stderr."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("\n{") :])


@pytest.fixture(scope="module")
def result(demo_model: Path) -> Any:
    configs = map(json.dumps, (NAIVE, EAGER, READING))
    return run_process("-m", "tests.support.interpreted", str(demo_model), *configs)


@pytest.fixture(scope="module")
def on_cpu(engine: Any, greedy: Any) -> list[list[int]]:
    """The same requests on the CPU worker, which has different kernels and packs holes."""
    with engine(**interpreted.ENGINE, **engine_args(NAIVE)) as llm:
        tokens: list[list[int]] = greedy(llm, interpreted.PROMPTS, interpreted.NUM_NEW)
    return tokens


def test_vllm_triton_attention_at_page_size_one_equals_the_oracle(result: Any) -> None:
    attention = result["attention"]
    assert attention["max_error"] < 1e-5
    assert attention["max_error_damaged"] > 1e-3  # one wrong page is detected


def test_its_output_is_bit_for_bit_the_same_for_any_token_placement(result: Any) -> None:
    assert result["attention"]["equal_when_moved"]
    assert result["attention"]["equal_to_block_size"]


def test_holes_are_read_through_pages_and_the_tokens_are_the_cpu_workers(
    result: Any, on_cpu: list[list[int]]
) -> None:
    naive = result["engines"][0]
    assert naive["tokens"] == on_cpu
    assert naive["paged_steps"] > 0
    assert naive["moved_tokens"] == naive["recycled_slots"] == 0


def test_relocated_tokens_are_read_where_they_are_and_no_token_changes(
    result: Any, on_cpu: list[list[int]]
) -> None:
    eager = result["engines"][1]
    assert eager["tokens"] == on_cpu
    assert eager["moved_tokens"] > 0
    assert eager["violations"] == 0


def test_the_score_kernel_equals_the_probe_in_plain_torch(result: Any) -> None:
    probe = result["probe"]
    for name in ("", "_capped", "_with_sinks", "_one_by_one"):
        assert probe[f"max_error{name}"] < 1e-6, name
    assert probe["max_error_damaged"] > 1e-3  # a missing cap is detected
    assert probe["max_error_without_sinks"] > 1e-3


def test_a_policy_that_reads_signals_evicts_the_cpu_workers_victims(
    result: Any, engine: Any, greedy: Any
) -> None:
    """`DeviceExecutor` makes and reports the signals; the kernel probes single queries."""
    found = result["engines"][2]
    with engine(**interpreted.ENGINE, **engine_args(READING)) as llm:
        runtime = runtime_of(llm)
        victims = interpreted.note_victims(runtime)
        assert greedy(llm, interpreted.PROMPTS, interpreted.NUM_NEW) == found["tokens"]
        shadow = runtime.state.shadow.document()
    assert found["victims"] == [list(died) for died in sorted(victims)]
    assert len(victims) >= 3
    assert found["shadow"] == [shadow.compared, shadow.agreed]
    assert 0 < shadow.agreed < shadow.victims  # the shadow read its own signals
    assert found["violations"] == 0
    assert found["probed_singles"] > 0


def test_the_checks_run_on_the_cpu_and_find_the_kernels_exact() -> None:
    names = ("pages", "copies", "overlap", "probe")
    done = subprocess.run(
        [sys.executable, "-m", "vtoken_bench.checks", *names, "--device", "cpu", "--tiny"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert [result["check"] for result in results] == list(names)
    for row in (row for result in results for row in result["rows"]):
        assert row.get("max_error", 0.0) < 1e-5
        assert all(value for key, value in row.items() if key.endswith("_exact"))
        assert all(value for key, value in row.items() if key.startswith("equal_bits"))


def test_a_check_without_a_device_reports_it_and_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vtoken_bench.checks", "pages"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "torch sees no CUDA device" in done.stderr
