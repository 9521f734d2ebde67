"""What every harness starts from: the configuration of `vtoken serve --vtoken-policy auto`."""

from __future__ import annotations

from typing import Any

from vtoken.core.config.values import AUTO_PATCH


def shipped(config: dict[str, Any] | None = None) -> dict[str, Any]:
    """`config` over what ships, as flags are: a policy of its own replaces all of `auto`."""
    config = config or {}
    return ({} if "policy" in config else AUTO_PATCH) | with_its_budget(config)


def with_its_budget(patch: dict[str, Any]) -> dict[str, Any]:
    """`patch`; a budget in tokens replaces the ratio."""
    return ({"budget_ratio": 0.0} if "budget_tokens" in patch else {}) | patch
