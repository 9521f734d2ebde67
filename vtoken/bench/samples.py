"""Samples of one runtime's memory between two steps: what is held, how full it is, the bound.

Reads the runtime, changes nothing. A sample counts requests whose prompt is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vtoken.runtime.runtime import Runtime

BINS = 4  # of block utilisation: up to 25%, 50%, 75%, 100%


def sample(runtime: Runtime) -> dict[str, Any] | None:
    """One sample, None while no request decodes. Blocks of several requests count for each in
    `held` and `bound`, once in `used`, which is what the pool gives away.
    """
    size = runtime.geometry.block_size
    requests = runtime.state.requests
    tables = [t for t in runtime.tables if t.num_tokens > requests[t.request_id].num_prompt_tokens]
    if not tables:
        return None
    pool = runtime.tables.pool
    live = pool.live[pool.holders > 0].astype(np.int64)  # small unsigned numbers have no negative
    bins = np.bincount(np.maximum(0, -(-live * BINS // size) - 1), minlength=BINS)
    return {
        "requests": len(tables),
        "held": sum(t.num_blocks for t in tables),
        "bound": sum(-(-t.num_live // size) for t in tables),
        "used": pool.num_used,
        "live": pool.num_live,
        "f": pool.fragmentation,
        "bins": bins.tolist(),
    }


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the samples; a block or a request of a step weighs the same in every step."""
    if not samples:
        raise ValueError("no request ever decoded: nothing was sampled")
    requests = sum(s["requests"] for s in samples)
    held, bound = (sum(s[key] for s in samples) for key in ("held", "bound"))
    bins = np.sum([s["bins"] for s in samples], axis=0)
    return {
        "samples": len(samples),
        "blocks_per_request": held / requests,
        "peak_blocks_per_request": max(s["held"] / s["requests"] for s in samples),
        "bound_per_request": bound / requests,
        "over_bound_ratio": held / bound - 1,
        "used_blocks": sum(s["used"] for s in samples) / len(samples),
        "f": sum(s["f"] for s in samples) / len(samples),
        "bins_ratio": (bins / bins.sum()).tolist(),
    }
