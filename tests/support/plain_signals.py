"""The built-in kinds of signals written out a second time, in plain Python, and what a request's
signal is made of.

Tests compare definitions and workers with these. Of the product's code nothing is used but the
parameters of a signal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.policies.signals import Signal


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


@dataclass(frozen=True)
class Forward:
    """What a model computed in one forward of a request: `live` tokens, the last `appended` of them
    new.
    """

    live: list[int]
    appended: int
    attentions: Mapping[int, Any]  # layer -> [head, query, token]
    keys: Mapping[int, Any]  # layer -> [KV head, token, D]


def over(values: Sequence[Any], how: str) -> Any:
    return np.max(values, axis=0) if how == "max" else np.mean(values, axis=0)


class Plain:
    """The signal of one request: rows as dictionaries, and key signals after every forward."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.rows: dict[int, dict[int, float]] = {}  # query position -> token -> r[q, t]
        self.keys: dict[int, dict[int, float]] = {}  # length -> token -> number
        self.live: dict[int, list[int]] = {}
        self.redundancy: dict[int, dict[int, float]] = {}  # length -> token -> redundancy
        self.seen: dict[tuple[int, int], list[Any]] = defaultdict(list)  # layer, KV head
        self._read_tokens = 0  # the request's tokens at the newest reading

    def add(self, forward: Forward, *, reads: bool = True) -> None:
        """Take a forward, after which keys are read or not."""
        signal, live = self.signal, forward.live
        num_heads = len(forward.attentions[signal.layers[0]])
        heads = signal.heads or range(num_heads)

        def keys_of(layer: int) -> list[Any]:
            keys = forward.keys[layer]
            return [np.asarray(keys[head * len(keys) // num_heads]) for head in heads]

        def seen_of(layer: int) -> list[Any]:
            if signal.anchor == "live":
                return [None] * len(heads)
            num_kv_heads = len(forward.keys[layer])
            return [np.array(self.seen[layer, h * num_kv_heads // num_heads]) for h in heads]

        self.live[live[-1] + 1] = live
        if reads:
            new = [place for place, token in enumerate(live) if token >= self._read_tokens]
            self._read_tokens = live[-1] + 1
            for layer, of_layer in forward.keys.items():
                for head, key in enumerate(of_layer):
                    self.seen[layer, head] += [*np.asarray(key)[new]]
        if signal.of_keys and not reads:
            return
        of_layers = []
        for layer in signal.layers:
            if signal.of_keys:
                read = zip(keys_of(layer), seen_of(layer), strict=True)
                values = [of_keys(signal.kind, key, seen) for key, seen in read]
            else:
                values = [np.asarray(forward.attentions[layer][head]) for head in heads]
            of_layers.append(over(values, signal.over_heads))
        if signal.is_mixed:
            keys_read = [key for layer in signal.layers for key in keys_of(layer)]
            repeated = np.mean([redundancy(key) for key in keys_read], axis=0).tolist()
            self.redundancy[live[-1] + 1] = dict(zip(live, repeated, strict=True))
        numbers = over(of_layers, signal.over_layers).tolist()
        if signal.of_keys:
            self.keys[live[-1] + 1] = dict(zip(live, numbers, strict=True))
            return
        for row, query in zip(numbers, live[-forward.appended :], strict=True):
            seen = [token for token in live if token <= query]
            self.rows[query] = dict(zip(seen, row, strict=False))

    def bounds(self, probed: list[int], length: int) -> dict[int, tuple[float, float]]:
        """Of every token that has a number the least and the greatest that rounding allows.

        `probed`: the queries so far, of which the newest were those of the newest forward.
        """
        if self.signal.of_keys:
            alone = {token: (value, value) for token, value in self.keys[length].items()}
        else:
            alone = {token: self._alone(probed, token) for token in self.live[probed[-1] + 1]}
        tokens, radius = sorted(alone), self.signal.pool_radius
        pooled = len(tokens) - max(self.signal.window_queries, 1) if radius else 0
        found = dict(alone)
        for place in range(pooled):
            around = tokens[max(0, place - radius) : min(pooled, place + radius + 1)]
            low, high = (
                max(side) if self.signal.pool == "max" else sum(side) / (2 * radius + 1)
                for side in zip(*(alone[t] for t in around), strict=True)
            )
            found[tokens[place]] = low, high
        if self.signal.is_mixed:
            share, repeated = self.signal.mix_lambda, self.redundancy[length]
            for token in repeated.keys() & found.keys():
                low, high = (share * side - (1 - share) * repeated[token] for side in found[token])
                found[token] = low, high
        return found

    def _alone(self, probed: list[int], token: int) -> tuple[float, float]:
        queries = probed[-self.signal.window_queries :]
        kind, got = self.signal.definition, [self.rows[q].get(token, 0.0) for q in queries]
        if kind.name != "attention_sum":  # what came before it was dead does not count
            was_dead = [token < q and token not in self.rows[q] for q in queries]
            got = [0.0 if any(was_dead[i:]) else given for i, given in enumerate(got)]
        rounding = 1e-4 if kind.counts else 0.0
        low, high = (
            of_queries(kind.name, [factor * a for a in got], [len(self.rows[q]) for q in queries])
            for factor in (1 - rounding, 1 + rounding)
        )
        return low, high

    def check(self, scores: Any, probed: list[int], length: int) -> int:
        """Assert that `scores`, by token id, are the numbers of the live tokens; how many were
        compared.
        """
        bounds, live = self.bounds(probed, length), self.live[length]
        assert len(scores) == max(bounds) + 1
        known = [token for token in live if token in bounds]
        low, high = np.array([bounds[token] for token in known]).T
        assert (scores[known] >= low - 2e-5 * np.maximum(1, abs(low))).all()
        assert (scores[known] <= high + 2e-5 * np.maximum(1, abs(high))).all()
        assert abs(scores[known]).max() > 0
        others = [token for token in live if token < len(scores) and token not in bounds]
        assert np.isposinf(scores[others]).all()
        return len(known)
