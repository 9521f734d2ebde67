"""Two ranks as actors of a local Ray: exact, under a change and a compaction.

vLLM's CPU platform names no resource of Ray, so vLLM itself refuses Ray there. Here the platform
names Ray's GPUs, of which the local Ray says that it has two. `make test-models` runs this file
where Ray is installed (the extra `ray`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import core_of, runtime_of
from tests.support.parallel import everywhere, num_sure, shape_of_cache, violations
from tests.support.ray_platform import name_gpus
from vtoken.wire.commands import Compact

ALL = bool(os.environ.get("VTOKEN_ALL_MODELS"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not ALL, reason="starts a Ray; `make test-models` runs it"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]

ROOT = Path(__file__).parents[2]
NUM_NEW = 80
BUDGET, INTERVAL = 64, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((150, 70, 101))]


@pytest.fixture(scope="module")
def two_actors(engine: Any) -> Iterator[Any]:
    import ray
    import vllm.envs
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as change:
        change.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        change.setenv("RAY_worker_niceness", "0")
        change.setattr(type(current_platform), "ray_device_key", "GPU")
        vllm.envs.disable_envs_cache()  # an earlier engine of this process has turned it on
        ray.init(
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=128 << 20,
            runtime_env={
                "env_vars": {"PYTHONPATH": str(ROOT)},
                "worker_process_setup_hook": name_gpus,
            },
        )
        try:
            with engine(
                tensor_parallel_size=2,
                distributed_executor_backend="ray",
                kv_cache_memory_bytes=32 << 20,
                **engine_args(
                    {
                        "policy": {"name": "streaming_llm"},
                        "budget_tokens": BUDGET,
                        "evict_when": "always",
                        "interval_tokens": INTERVAL,
                        "verify_ratio": 1.0,
                    },
                    check_every_step=True,
                ),
            ) as llm:
                yield llm
        finally:
            ray.shutdown()


def test_tokens_of_two_actors_equal_the_reference_under_a_change_and_compactions(
    two_actors: Any, greedy: Any, hf_model: Any
) -> None:
    core, runtime = core_of(two_actors), runtime_of(two_actors)
    assert type(core.model_executor).__name__ == "RayExecutorV2"
    controller, operations, begin = core.scheduler.vtoken_controller, [], runtime.begin_step

    def begin_step(*args: Any) -> None:
        if runtime.step % 20 == 10:
            controller.patch_config({"theta_f": 0.9 if runtime.step % 40 == 10 else 0.0})
            operations.append(controller.compact(Compact(), ""))
        begin(*args)

    runtime.begin_step = begin_step
    found = greedy(two_actors, PROMPTS, NUM_NEW)
    runtime.begin_step = begin
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        trace = reference.trace(hf_model, prompt, NUM_NEW, evict, draft=tokens)
        sure = num_sure(trace)
        assert sure > NUM_NEW // 2
        assert tokens[:sure] == trace.tokens[:sure]
    assert len(everywhere(two_actors, shape_of_cache)) == 2
    assert {operation.state for operation in operations} == {"done"}
    assert runtime.counters.tokens.evicted > 100
    assert runtime.counters.reclamation.relocations > 0
    assert violations(two_actors) == []
