"""A made-up calibration profile for tests."""

from __future__ import annotations

from typing import Any

from vtoken.core.config.calibration import FORMAT, CalibrationProfile, SignalProfile
from vtoken.wire import Recall

RECALL = [
    Recall(keep=0.5, recall=1.0, samples=24),
    Recall(keep=0.25, recall=0.75, samples=24),
]


def made_up(**changes: Any) -> CalibrationProfile:
    """The profile of a model of 4 layers and 4 query heads; `changes`: fields to replace."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "model": "made-up/model",
        "fingerprint": "0123456789abcdef" * 2,
        "num_layers": 4,
        "num_heads": 4,
        "vtoken_version": "0.1.0",
        "created_ts": 1_700_000_000.0,
        "signals": {
            "attention_sum": SignalProfile([3], [1, 2], RECALL),
            "key_norm": SignalProfile([], [], RECALL),
        },
        "policies": {"h2o": RECALL},
    }
    return CalibrationProfile(**fields | changes)
