"""The engines that a soak runs in turn, one phase each. Does not import vLLM.

Pools are small, so that a few requests fill them and eviction, relocation, borrowing and preemption
coincide all the time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.shipped import shipped

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
    "enable_prefix_caching": True,
    "max_num_seqs": 16,
}

# Over what ships: many requests are shorter than the floor that ships, and a phase is short.
START = {"budget_floor_tokens": 32, "park_bytes": 1 << 26, "restore_after_ms": 0}


class Engine(msgspec.Struct, frozen=True):
    """`arguments`: of vLLM's engine. `environment`: of its process. `overlap`: asynchronous
    scheduling, which vLLM disables on CPU. `keeps`: settings that no change names.
    """

    arguments: dict[str, Any]
    overlap: bool = False
    keeps: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class Phase(msgspec.Struct, frozen=True):
    """One engine under traffic for `seconds`, or for exactly `steps` rounds if given."""

    name: str
    seed: int
    seconds: float
    engine: Engine
    model: str
    log: str  # every action, one JSON line each
    steps: int | None = None
    # How far a sampled token's logit may be below the best one; only rounding in float32.
    tolerance: float = 1e-3


def _engine(
    block_size: int, num_blocks: int, chunk: int, model_len: int, **more: Any
) -> dict[str, Any]:
    return COMMON | {
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "max_num_batched_tokens": chunk,
        "max_model_len": model_len,
        **more,
    }


TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PRIORITIES = {
    "scheduling_policy": "priority",  # a running request may be preempted for an older one
    "long_prefill_token_threshold": 40,
    "long_prefill_token_threshold_adaptive": True,
}
ENGINES: dict[str, Engine] = {
    "16 x 40, tiny pool, what ships": Engine(
        _engine(16, 40, 128, 512), keeps=(*shipped(START), "budget_tokens")
    ),
    "32 x 48, shared prefixes": Engine(_engine(32, 48, 256, 1024)),
    "16 x 40, tiny pool": Engine(_engine(16, 40, 128, 512)),
    "32 x 48, steps overlap": Engine(_engine(32, 48, 256, 1024), overlap=True),
    "64 x 20, no prefix cache": Engine(
        _engine(64, 20, 512, 1024, enable_prefix_caching=False),
    ),
    "32 x 64, bfloat16": Engine(_engine(32, 64, 256, 1024, dtype="bfloat16")),
    "16 x 96, small chunks": Engine(_engine(16, 96, 48, 768)),
    "32 x 48, two ranks": Engine(
        _engine(32, 48, 256, 1024, **TWO_RANKS),
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "128 x 12, long chunks": Engine(_engine(128, 12, 1024, 1024)),
    "16 x 64, priorities": Engine(_engine(16, 64, 192, 768, **PRIORITIES)),
    "16 x 64, priorities overlap": Engine(_engine(16, 64, 192, 768, **PRIORITIES), overlap=True),
}
# In bfloat16 rounding depends visibly on the order of slots.
TOLERANCES = {"bfloat16": 0.5}


def plan_phases(
    *, seconds: float, seed: int, model: str, logs: str, only: str | None, phase_seconds: float
) -> list[Phase]:
    """Phases of about `phase_seconds` that fill `seconds`, the engines in turn."""
    names = [name for name in ENGINES if only is None or only in name]
    if not names:
        raise ValueError(f"no engine matches {only!r}: " + "; ".join(ENGINES))
    count = max(1, round(seconds / phase_seconds))
    return [
        Phase(
            name=names[number % len(names)],
            seed=seed + number,
            seconds=seconds / count,
            engine=ENGINES[names[number % len(names)]],
            model=model,
            log=f"{logs}/phase-{number}.jsonl",
            tolerance=TOLERANCES.get(ENGINES[names[number % len(names)]].arguments["dtype"], 1e-3),
        )
        for number in range(count)
    ]
