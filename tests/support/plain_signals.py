"""The built-in kinds of signals written out a second time, in plain Python.

Tests compare definitions, workers and calibration with these; nothing here uses the product's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def of_queries(kind: str, got: Sequence[float], seen: Sequence[int]) -> float:
    """The number of a token that received `got` [k] from the queries that the signal rests on, the
    newest last; `seen` [k]: the tokens that each of them can see.
    """
    return {
        "attention_sum": sum(got),
        "attention_last": got[-1],
        "attention_window": sum(got) / len(got),
        "attention_max": max(got),
        "attention_least": min(got),  # of examples/signal
        "attention_hits": float(sum(a * n >= 1 for a, n in zip(got, seen, strict=True))),
    }[kind]


def of_keys(kind: str, keys: Any, seen: Any = None) -> Any:
    """The numbers [n] of the keys [n, D] of one head; `seen` [m, D]: those that an anchor is made
    of, by default `keys`.
    """
    keys = np.asarray(keys, dtype=np.float64)
    norms = np.sqrt((keys**2).sum(axis=1))
    if kind == "key_norm":
        return -norms
    assert kind == "key_difference"
    seen = keys if seen is None else np.asarray(seen, dtype=np.float64)
    mean = sum(key / np.sqrt(key @ key) for key in seen) / len(seen)
    return np.array([-(key @ mean) for key in keys]) / (norms * np.sqrt(mean @ mean))


def redundancy(keys: Any) -> Any:
    """The redundancy [n] of the keys [n, D] of one head, row by row."""
    keys = np.asarray(keys, dtype=np.float64)
    unit = np.array([key / np.sqrt(key @ key) for key in keys])
    sums = np.zeros(len(keys))
    for i, one in enumerate(unit):
        row = unit @ one
        row[i] = 0
        similar = np.flatnonzero(row > 0.5)
        row[similar[-1] if len(similar) else 0] = 0
        sums += row
    weights = np.exp(sums / len(keys))
    return weights / weights.sum()
