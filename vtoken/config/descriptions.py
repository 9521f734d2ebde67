"""A change of the configuration in words: what differs, and what of it waits for something else.

Knows configurations only.
"""

from __future__ import annotations

from typing import Any

from vtoken.config.values import VTokenConfig, diff


def told_changes(changes: dict[str, list[Any]]) -> str:
    """`changes` is field -> [old, new]: `theta_f 0.25 -> 0.5, planner plug -> pack`."""
    return ", ".join(
        f"{name} {_short(old)} -> {_short(new)}" for name, (old, new) in changes.items()
    )


def waiting_notes(old: VTokenConfig, new: VTokenConfig) -> list[str]:
    """Which of the values that change wait for something else, in words."""
    changed = diff(old.values(), new.values())
    notes = []
    gates = [name for name in ("theta_f", "low_watermark_blocks") if name in changed]
    if gates and new.reclamation != "auto":
        told = " and ".join(gates)
        notes.append(f"{told}: without effect while reclamation is {new.reclamation}")
    unused = "budget_tokens" if new.budget_ratio > 0 else "budget_floor_tokens"
    if unused in changed:
        notes.append(f"{unused}: without effect while budget_ratio is {new.budget_ratio:g}")
    rules = ("budget_tokens", "budget_ratio", "interval_tokens", "evict_during", "protect")
    limits = [n for n in rules if n in changed and n != unused]
    if limits and not new.evicts:
        told = " and ".join(limits)
        notes.append(f"{told}: only for requests with a policy of their own, while policy is none")
    return notes


def _short(value: Any) -> str:
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return "none" if value is None else str(value)
