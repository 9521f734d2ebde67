"""Engines with the shipped configuration, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from tests.support.shipped import shipped
from vtoken import vllm as plugin


def engine_args(config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """As `vtoken.vllm.engine_args`, with `config` over the shipped one."""
    return plugin.engine_args(shipped(config), **settings)
