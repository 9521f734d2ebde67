"""A violation in strict mode stops the engine before a token of that step leaves; in lenient mode
the engine continues and counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.engine import CONFIG, ENGINE_ARGUMENTS
from tests.soak.oracle import Oracle
from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import runtime_of
from tests.support.waiting import LIMIT_S
from vtoken.base.errors import InvariantViolation
from vtoken.demo.server import ProcessGroup

pytestmark = pytest.mark.vllm

PROMPTS = [reference.random_prompt(90 + 10 * i, i) for i in range(3)]
NUM_NEW = 60


def broken(*, strict: bool) -> dict[str, Any]:
    arguments = engine_args(CONFIG, strict=strict)
    return ENGINE_ARGUMENTS | arguments | {"worker_cls": "tests.faults.broken_worker.BrokenWorker"}


def run(llm: Any, tokens: dict[int, list[int]]) -> None:
    """Step until all requests finish; `tokens` collects the engine's output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_NEW,
        ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    for number, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)


def test_strict_no_token_of_a_violated_step_leaves_the_engine(
    engine: Any, demo_model: Path
) -> None:
    from tests.soak.engine import Watch

    tokens: dict[int, list[int]] = {}
    with engine(**broken(strict=True)) as llm:
        watch = Watch(llm.llm_engine.engine_core.engine_core.scheduler)
        with pytest.raises(InvariantViolation, match=r"I1: relocation of .* in layer 3"):
            run(llm, tokens)
        counters = runtime_of(llm).counters
        assert counters.invariants.violations == 1
        (event,) = [
            e for e in runtime_of(llm).events.page(0, 10_000).events if e.kind == "violation"
        ]
        assert event.data["invariant"] == "I1"
    assert all(0 < len(sampled) < NUM_NEW for sampled in tokens.values())
    oracle = Oracle(demo_model)
    for number, sampled in tokens.items():
        stretches = watch.stretches[str(number)]
        verdict = oracle.compare(PROMPTS[number], sampled, stretches)
        assert len(verdict.gaps) == len(sampled)
        assert verdict.num_worse_than(1e-3) == 0


def test_lenient_the_engine_continues_and_reports_the_violation(engine: Any) -> None:
    tokens: dict[int, list[int]] = {}
    with engine(**broken(strict=False)) as llm:
        run(llm, tokens)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        invariants = scheduler.vtoken_controller.reporter.status().invariants
        assert invariants.violations > 0
        assert not invariants.strict
        assert invariants.verified_relocations >= invariants.violations
        assert invariants.verify_us > 0
    assert [len(sampled) for sampled in tokens.values()] == [NUM_NEW] * len(PROMPTS)


@pytest.mark.slow
def test_strict_a_server_fails_its_requests_and_its_health_and_names_the_invariant(
    demo_model: Path, tmp_path: Path, free_port: int
) -> None:
    from vtoken.vllm.serve import plugin_names, server_command

    command = server_command(
        [
            str(demo_model),
            f"--port={free_port}",
            "--served-model-name=demo",
            "--dtype=float32",
            "--enforce-eager",
            "--max-model-len=512",
            "--block-size=16",
            "--kv-cache-memory-bytes=16777216",
            "--vtoken-policy=random",
            "--vtoken-budget-tokens=48",
            "--vtoken-evict-when=always",
            "--vtoken-interval-tokens=12",
            "--vtoken-theta-f=0",
            "--vtoken-low-watermark-blocks=96",
            "--vtoken-verify-ratio=1",
            "--no-vtoken-recycle",
            "--num-gpu-blocks-override=96",
        ]
    )
    worker = command.index("--worker-cls") + 1
    command[worker] = "tests.faults.broken_worker.BrokenWorker"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        "VLLM_PLUGINS": plugin_names(),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VTOKEN_ENABLED": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    group = ProcessGroup(command, tmp_path / "server.log", environment)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{free_port}", timeout=LIMIT_S, trust_env=False
        ) as http:
            assert wait_for_health(http, group, healthy=True), group.log_tail()
            body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True}
            # The server may go down with its engine before it can answer.
            with contextlib.suppress(httpx.TransportError):
                assert http.post("/v1/completions", json=body).status_code == 500
            assert wait_for_health(http, group, healthy=False)
    finally:
        group.stop()
    assert "InvariantViolation: I1: relocation of" in group.log.read_text(errors="replace")


def wait_for_health(http: httpx.Client, group: ProcessGroup, *, healthy: bool) -> bool:
    """Wait until /health returns 200, or anything else."""
    for _ in range(500):
        try:
            answers = http.get("/health").status_code == 200
        except httpx.TransportError:
            answers = False
            if healthy and group.process.poll() is not None:
                return False
        if answers == healthy:
            return True
        time.sleep(0.5)
    return False


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
