"""Changes of the configuration with the console's arrow."""

from __future__ import annotations

from typing import Any

from vtoken import sentences


def change_text(changes: dict[str, list[Any]]) -> str:
    """Changes as text: theta_f 0.4 → 0.25, planner pack → plug."""
    return sentences.change_text(changes, "→")
