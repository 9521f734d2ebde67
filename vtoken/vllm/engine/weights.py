"""Tells the scheduler of a call to the workers that may change the model's weights.

vLLM changes weights under running requests by `collective_rpc` alone: `update_weights` and the
calls around it, `reload_weights`, a worker extension's own methods, functions. Names cannot tell
which of the latter change weights, so each counts that is not known to read only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.engine.core import EngineCore

READ_ONLY = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)


def watch_weights() -> None:
    """Wrap the engine core's `collective_rpc`. Idempotent."""
    call = EngineCore.collective_rpc
    if not hasattr(call, "watches_weights"):
        EngineCore.collective_rpc = _watching(call)


def _watching(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = getattr(core, "scheduler", None)  # vLLM makes calls before it has one
        tell = getattr(scheduler, "vtoken_weights_changed", None)
        if tell is not None and method not in READ_ONLY:
            tell(method if isinstance(method, str) else getattr(method, "__name__", "a function"))
        return call(core, method, *args, **kwargs)

    collective_rpc.watches_weights = True  # type: ignore[attr-defined]
    return collective_rpc
