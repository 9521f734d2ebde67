"""What every harness starts from: the configuration of `vtoken serve --vtoken-policy auto`."""

from __future__ import annotations

from typing import Any

from vtoken.core.config.values import AUTO_PATCH
from vtoken.vllm.startup.host_memory import AUTO

PARK_BYTES = 1 << 20  # of engines without vLLM, which have no start-up that resolves `auto`


def shipped(config: dict[str, Any] | None = None, park_bytes: int | str = AUTO) -> dict[str, Any]:
    """`config` over what ships, as flags are: a policy of its own replaces all of `auto`."""
    config = config or {}
    auto = AUTO_PATCH | {"park_bytes": park_bytes}
    return ({} if "policy" in config else auto) | with_its_budget(config)


def with_its_budget(patch: dict[str, Any]) -> dict[str, Any]:
    """`patch`; a budget in tokens replaces the ratio."""
    return ({"budget_ratio": 0.0} if "budget_tokens" in patch else {}) | patch
