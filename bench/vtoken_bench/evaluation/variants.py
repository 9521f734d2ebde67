"""The variants that are compared: same build, same requests, same budgets.

They differ in what is done about dead tokens. A configuration is a patch over `NEUTRAL`, so that an
engine goes from one variant to the next without being started again; stock vLLM is an engine of its
own.
"""

from __future__ import annotations

from typing import Any

NATIVE = "native"
NAIVE = "naive-evict"
PAPER = "vToken, paper"
DEFAULTS = "vToken"
POOL = "pool"  # stands for all blocks of the pool
PARKED = "park_share"  # in place of `park_bytes`: a share of the pool's bytes

# Every field that a variant or an experiment touches, at its default.
NEUTRAL: dict[str, Any] = {
    "reclamation": "auto",
    "theta_f": 0.25,
    "batch_size": 32,
    "low_watermark_blocks": "eighth of the pool",
    "headroom_blocks": "thirtieth of the pool",
    "recycle": True,
    "prefix_sharing": "index",
    "verify_ratio": 0.0,
    "budget_tokens": 2048,
    "budget_ratio": 0.0,
    "budget_floor_tokens": 256,
    "interval_tokens": 16,
    "evict_when": "always",
    "park_bytes": 0,
    "restore_after_ms": 500,
    "experiment": {"planner": "plug", "round_rule": "price", "admission": "compressed"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    NAIVE: {"reclamation": "off"},
    # Paper, 3.3: copies out of the worst blocks once F exceeds theta_F, appends to the end, leaves
    # shared blocks alone. The watermark is the pool, so that F alone decides, as in figure 6.
    PAPER: {
        "experiment": {"planner": "pack", "round_rule": "paper"},
        "recycle": False,
        "prefix_sharing": "skip",
        "low_watermark_blocks": POOL,
    },
    DEFAULTS: {},
}


def configuration(patch: dict[str, Any], num_blocks: int, block_bytes: int = 0) -> dict[str, Any]:
    """`NEUTRAL` and `patch` over it, for a pool of `num_blocks` of `block_bytes` each."""
    from vtoken.wire import pool_limits

    limits = pool_limits(num_blocks)
    found = NEUTRAL | patch
    found["experiment"] = NEUTRAL["experiment"] | patch.get("experiment", {})
    for name in ("low_watermark_blocks", "headroom_blocks"):
        if found[name] == NEUTRAL[name]:
            found[name] = limits[name].default
    for name in ("low_watermark_blocks", "batch_size"):
        if found[name] == POOL:
            found[name] = num_blocks
        found[name] = min(found[name], num_blocks)
    if PARKED in found:
        found["park_bytes"] = int(found.pop(PARKED) * num_blocks * block_bytes)
    return found
