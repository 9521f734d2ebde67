"""Samples of one runtime's memory between two steps: blocks held, their utilisation, the bound.

Only requests whose prompt is computed count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vtoken.core.runtime.runtime import Runtime

BINS = 4  # of block utilisation: up to 25%, 50%, 75%, 100%


def sample(runtime: Runtime) -> dict[str, Any] | None:
    """One sample; None if no request decodes.

    A shared block counts once per request in `held` and `bound`, and once in `used`,
    as in the pool.
    """
    size = runtime.geometry.block_size
    requests = runtime.requests.held
    tables = [t for t in runtime.tables if t.num_tokens > requests[t.request_id].num_prompt_tokens]
    if not tables:
        return None
    pool = runtime.tables.pool
    live = pool.live[pool.holders > 0].astype(np.int64)  # unsigned numbers cannot be negated
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
    """Means over the samples, weighted by blocks and requests, not by steps."""
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
