"""Engines with the shipped configuration, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from tests.support.shipped import shipped
from vtoken import vllm as plugin

# Closes holes as soon as there are any, in pools of up to 512 blocks.
EAGER = {"theta_f": 0.0, "low_watermark_blocks": 512, "batch_size": 64, "headroom_blocks": 64}
# The same instead of recycling.
RELOCATING = {"recycle": False, **EAGER, "low_watermark_blocks": 511}
# Scattered victims under a small budget, whose holes are recycled.
H2O = {
    "policy": {"name": "h2o"},
    "budget_tokens": 48,
    "evict_when": "always",
    "interval_tokens": 8,
    "experiment": {"round_rule": "paper"},
}


def engine_args(config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """As `vtoken.vllm.engine_args`, with `config` over the shipped one."""
    return plugin.engine_args(shipped(config), **settings)
