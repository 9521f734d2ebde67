"""Formats configuration values and changes as short text."""

from __future__ import annotations

from typing import Any


def change_text(changes: dict[str, list[Any]]) -> str:
    """Changes as text: theta_f 0.4 → 0.25, planner pack → plug."""
    return ", ".join(
        f"{name} {value_text(old)} → {value_text(new)}" for name, (old, new) in changes.items()
    )


def value_text(value: Any) -> str:
    """A configuration value as short text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict) and "name" in value:
        params = ", ".join(f"{k}={value_text(v)}" for k, v in value.get("params", {}).items())
        return f"{value['name']}({params})" if params else str(value["name"])
    if isinstance(value, dict):
        return ", ".join(f"{k}={value_text(v)}" for k, v in value.items())
    return str(value)
