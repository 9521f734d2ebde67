"""What vToken's own arrays and tensors hold beside the KV cache, in both processes of an engine."""

from __future__ import annotations

from typing import Any

from vtoken_bench.sizes import deep_bytes


def own_bytes(scheduler: Any, runner: Any) -> dict[str, float]:
    """Bytes after a load, with the reserve that arrays keep; `block`: of a block of the cache.

    `tables`: the scheduler's. `mirrors`: the worker's; on a device with its page tables and copy
    buffers. `buffers`: side buffers and the record of packed slots, on a CPU.
    """
    tables = scheduler.vtoken.tables
    store = scheduler.vtoken.store  # leads to all of vLLM's block manager
    caches = list(runner.kv_caches)
    half = getattr(runner, "vtoken_device", None)
    if half is None:
        mirrors: list[object] = [runner.executor.mirrors]
        buffers: list[object] = [runner.vtoken_packed, runner.vtoken_side_buffer]
    else:
        mirrors, buffers = [half], []
    return {
        "tables": deep_bytes([tables], ends=[store, scheduler]),
        "mirrors": deep_bytes(mirrors, excluded=caches, ends=[runner]),
        "buffers": deep_bytes(buffers, excluded=caches, ends=[runner]),
        "block": sum(cache.nbytes for cache in caches) / len(caches[0]),
    }
