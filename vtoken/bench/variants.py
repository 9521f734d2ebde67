"""The variants that memory and capacity compare, and how their engines and requests are made.

All have the same build and the same budgets, half of prompt and output, a request; they differ in
what is done about dead tokens.
"""

from __future__ import annotations

import sys
from typing import Any

from vtoken.bench.engines import Engine, engine_args

BLOCK_SIZE = 16
INTERVAL_TOKENS = 16
SAMPLE_EVERY = 8
# Filling holes needs next to no headroom, and admission leaves the headroom free.
EAGER = {"theta_f": 0.0, "low_watermark_blocks": "pool", "headroom_blocks": 2, "batch_size": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "naive-evict": {"reclamation": "off"},
    "vToken, eager plug": EAGER | {"recycle": False},
    "vToken, eager plug, recycling": EAGER,
    "vToken, defaults": {},
}


def start(name: str, config: dict[str, Any], num_blocks: int, **engine: Any) -> Engine:
    """An engine with `num_blocks` usable blocks and `config`, "pool" standing for all of them."""
    print(f"starting {name}", file=sys.stderr, flush=True)
    config = {key: num_blocks if value == "pool" else value for key, value in config.items()}
    args = engine_args(
        engine.pop("model", None),
        block_size=BLOCK_SIZE,
        max_model_len=2048,
        num_gpu_blocks_override=num_blocks + 1,
        kv_cache_memory_bytes=256 << 20,  # else the CPU build asks for nearly all memory
        **engine,
    )
    return Engine(name, {"interval_tokens": INTERVAL_TOKENS} | config, args)


def request(ids: list[int], num_new: int, *, evicting: bool) -> dict[str, Any]:
    """A request of a workload; `evicting`: with a budget of half its length."""
    budget = (len(ids) + num_new) // 2
    arguments = {"vtoken_budget_tokens": budget} if evicting else None
    return {"prompt": ids, "num_new": num_new, "arguments": arguments}


def find(rows: list[dict[str, Any]], like: dict[str, Any], variant: str) -> dict[str, Any] | None:
    """The row of `variant` beside `like`."""
    for row in rows:
        same = all(row.get(k) == like.get(k) for k in ("workload", "policy", "degree"))
        if same and row["variant"] == variant:
            return row
    return None
