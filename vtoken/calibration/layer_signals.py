"""Signals, as `vtoken.policies.signals` defines them, from the complete attention of layers.

Every token of a prompt is live, since nothing has been evicted. Functions import torch when called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vtoken.base.arrays import Floats
from vtoken.calibration.ranking import RADIUS
from vtoken.policies import make_policy, policy_names
from vtoken.policies.base import BUILT_IN
from vtoken.policies.signals import Signal, pooled, redundancy

Survey = dict[str, tuple[Floats, Floats | None]]
Part = tuple[Any, Floats | None]  # of one layer: rows [k, n] or [n], and redundancy [n]


def measured_signals() -> dict[str, Signal]:
    """Kind -> one signal of each kind that a policy reads by default.

    Its window is the shortest of the built-in policies that read it, else of the others. Its
    neighbours are those of `vtoken.calibration.ranking`. A signal with redundancy is measured as
    its kind and does not shorten the window.
    """
    others = [name for name in policy_names() if name not in BUILT_IN]
    windows = _windows(others) | _windows(BUILT_IN)
    return {
        kind: Signal(kind, window, pool="max", pool_radius=RADIUS)
        for kind, window in sorted(windows.items())
    }


def _windows(policies: Iterable[str]) -> dict[str, int]:
    """Kind -> the shortest window of `policies`."""
    found: dict[str, int] = {}
    for name in policies:
        reads = make_policy(name, {}).reads
        if reads is not None and not reads.is_mixed:
            known = found.get(reads.kind, reads.window_queries)
            found[reads.kind] = min(known, reads.window_queries)
    return found


def survey(signals: Mapping[str, Signal], weights: Any, keys: Any) -> Survey:
    """Kind -> numbers of one layer's tokens: [n] over all heads, [H, n] of each query head alone.

    They are not pooled over neighbours. `weights`, `keys`: see
    `vtoken.calibration.observe.LayerHook`. Signals of keys have no numbers of query heads.
    """
    weights = weights.float()
    mean = weights.mean(dim=0)
    found: Survey = {}
    for kind, signal in signals.items():
        if signal.of_keys:
            found[kind] = _array(signal.definition.numbers(keys.float()).mean(dim=0)), None
        else:
            of_all, of_each = signal.from_rows(mean), signal.from_rows(weights)
            found[kind] = _array(of_all), _array(of_each)
    return found


class Reading:
    """The exact numbers of `signals`, each with its layers and heads, for any number of prompts.

    Call `look` with each layer of a prompt, then `scores` with the results of `look`.
    """

    def __init__(self, signals: Sequence[Signal]) -> None:
        self._signals = list(dict.fromkeys(signals))

    def look(self, layer: int, weights: Any, keys: Any) -> dict[Signal, Part]:
        """Each signal's part of `layer`: the rows of its queries, or one number a token."""
        found: dict[Signal, Part] = {}
        for signal in self._signals:
            if layer not in signal.layers:
                continue
            of_query_heads = [*(signal.heads or range(len(weights)))]
            read = [head * len(keys) // len(weights) for head in of_query_heads]
            if signal.of_keys:
                heads = signal.definition.numbers(keys.float())[read]
            else:
                heads = _newest(signal, weights).float()[of_query_heads]
            of_redundancy = None
            if signal.is_mixed:
                of_redundancy = redundancy(_array(keys))[read].mean(axis=0)
            found[signal] = _over(signal.over_heads, heads), of_redundancy
        return found

    def scores(self, parts: Sequence[dict[Signal, Part]]) -> dict[Signal, Floats]:
        """Each signal's numbers [n], higher = keep."""
        import torch

        found = {}
        for signal in self._signals:
            own = [part[signal] for part in parts if signal in part]
            rows = _array(_over(signal.over_layers, torch.stack([rows for rows, _ in own])))
            scores = pooled(signal, rows if signal.of_keys else signal.from_rows(rows))
            of_layers = [of_redundancy for _, of_redundancy in own if of_redundancy is not None]
            if of_layers:
                scores = signal.mixed(scores, np.mean(of_layers, axis=0))
            found[signal] = scores
        return found


def _newest(signal: Signal, weights: Any) -> Any:
    """The rows [..., k, n] of `weights` that `signal` uses: its newest queries, or their sum."""
    if signal.sums_rows:
        return weights.sum(dim=-2, keepdim=True)
    return weights[..., -signal.num_rows(weights.shape[-1]) :, :]


def _over(aggregate: str, tensor: Any) -> Any:
    return tensor.amax(dim=0) if aggregate == "max" else tensor.mean(dim=0)


def _array(tensor: Any) -> Floats:
    array: Floats = tensor.cpu().numpy().astype(np.float32)
    return array
