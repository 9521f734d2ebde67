"""Engines whose budgets are fixed, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from vtoken import vllm as plugin


def engine_args(config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """As `vtoken.vllm.engine_args`, under `evict_when: always`."""
    return plugin.engine_args({"evict_when": "always"} | (config or {}), **settings)
