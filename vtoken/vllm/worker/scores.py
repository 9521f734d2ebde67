"""Turns a step's attention rows into the scores in its report: feeds accumulators, reads signals.

Uses mirrors, ranks and tensors; independent of the runner and of the attention layer that made the
rows. `HostScores` works on the host; `vtoken.vllm.cuda.signals.scores` on a device.

Scores are reported by token id. Ids are recorded in the same step as the rows and never change. So
scores that reach the host late still belong to the right tokens, whatever was appended, evicted or
moved in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.base.arrays import Floats, Ints
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Accumulator, Signal, by_id, make_accumulator
from vtoken.vllm.worker.probe import (
    ProbedRequest,
    folded,
    key_redundancy,
    key_values,
    pooled,
)
from vtoken.vllm.worker.ranks import Ranks

SignalKey = tuple[str, Signal]
PendingScores = Callable[[], dict[SignalKey, Floats]]
Keys = Callable[[int], torch.Tensor]
Upload = Callable[[Ints], torch.Tensor]
Owners = dict[SignalKey, tuple[Ints, int]]


class Scores:
    """Turns the rows of a worker's probes into scores.

    `keys(layer)` is the layer's keys as a view [N, S, Hkv, D], read by `num_heads` query heads of
    this rank. A host and a device differ in four methods.
    """

    def __init__(self, keys: Keys, num_heads: int) -> None:
        self._keys = keys
        self._num_heads = num_heads

    def make_accumulator(self, signal: Signal) -> Accumulator:
        """The accumulator of an attention signal."""
        raise NotImplementedError

    def _rows(self, rows: torch.Tensor) -> Any:
        """`rows` as an accumulator takes them."""
        raise NotImplementedError

    def _upload(self, array: Ints) -> torch.Tensor:
        """Copy `array` to the cache's device."""
        raise NotImplementedError

    def _send(self, values: Mapping[SignalKey, torch.Tensor], owners: Owners) -> PendingScores:
        """Start the transfer of `values[key]` [n], which belong to the tokens in `owners[key]`."""
        raise NotImplementedError

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
    ) -> PendingScores:
        """After the step's forward: feed `probed` to the accumulators; gather what `plan` requests.

        The result, called once and from any thread, returns `WorkerReport.scores`; it may wait for
        the device.
        """
        for request, rows in accumulator_rows(probed, ranks):
            accumulator = request.mirror.accumulators[request.signal]
            accumulator.add(request.ids, self._rows(rows), request.num_new)
        requested = RequestedScores(plan, mirrors, self._upload)
        requested.read_accumulators()
        requested.read_keys(self._keys, self._num_heads, ranks)
        return self._send(requested.reduced(ranks), requested.owners)


class HostScores(Scores):
    """Accumulators of numpy arrays."""

    def make_accumulator(self, signal: Signal) -> Accumulator:
        return make_accumulator(signal)

    def _rows(self, rows: torch.Tensor) -> Floats:
        array: Floats = rows.numpy()
        return array

    def _upload(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array)

    def _send(self, values: Mapping[SignalKey, torch.Tensor], owners: Owners) -> PendingScores:
        scores = {
            key: by_id(owners[key][0], found.numpy(), owners[key][1])
            for key, found in values.items()
        }
        return lambda: scores


class RequestedScores:
    """The scores that a plan requests, gathered on one rank and reduced over all ranks.

    `owners`: the ids [n] that the scores belong to, and the number of tokens that the request had.
    `upload` copies a host array to the cache's device.
    """

    def __init__(self, plan: StepPlan, mirrors: Mapping[str, Mirror], upload: Upload) -> None:
        self._upload = upload
        self._requested = [(key, mirrors[key[0]]) for key in plan.want_scores if key[0] in mirrors]
        self._values: dict[SignalKey, torch.Tensor] = {}
        self._parts: dict[SignalKey, torch.Tensor] = {}  # of key signals, from `key_values`
        self._slots: dict[SignalKey, Ints] = {}  # of the live tokens, for signals with redundancy
        self._redundancy: dict[SignalKey, torch.Tensor] = {}  # of the tokens that have a score
        self.owners: Owners = {}

    def read_accumulators(self) -> None:
        """Read the attention signals from this rank's accumulators."""
        for key, mirror in self._requested:
            accumulator = mirror.accumulators.get(key[1])
            scores = None if accumulator is None else accumulator.scores()
            if accumulator is None or scores is None:
                continue
            values, ids, num_tokens = (
                torch.as_tensor(scores),
                accumulator.ids,
                accumulator.num_tokens,
            )
            if key[1].is_mixed:
                live, self._slots[key] = mirror.live()
                known = live[: np.searchsorted(live, num_tokens)]
                if len(known) < len(ids):  # some died since the newest probe
                    values = values.index_select(0, self._upload(np.searchsorted(ids, known)))
                    ids = known
            self._values[key], self.owners[key] = values, (ids, num_tokens)

    def read_keys(self, keys: Keys, num_heads: int, ranks: Ranks) -> None:
        """Compute the key signals, and the redundancy of the tokens that were added."""
        for key, mirror in self._requested:
            if key[1].of_keys:
                ids, slots = mirror.live()
                self.owners[key] = ids, mirror.num_tokens
                layers = [keys(layer) for layer in key[1].layers]
                self._parts[key] = key_values(
                    key[1], self._upload(slots), layers, num_heads, ranks.heads
                )
        for key, slots in self._slots.items():
            layers = [keys(layer) for layer in key[1].layers]
            of_live = key_redundancy(key[1], self._upload(slots), layers, num_heads, ranks.heads)
            self._redundancy[key] = of_live[: len(self.owners[key][0])]

    def reduced(self, ranks: Ranks) -> dict[SignalKey, torch.Tensor]:
        """All scores [n], over the heads of all ranks; empty if ranks differ.

        The accumulator of a non-linear signal already holds the rows of all ranks, see
        `accumulator_rows`.
        """
        linear = {key: v for key, v in self._values.items() if key[1].is_linear}
        found = ranks.sum(linear)
        if ranks.agreed:
            found |= {key: v for key, v in self._values.items() if key not in linear}
        for key, redundancy in ranks.sum(self._redundancy).items():
            found[key] = key[1].mixed(found[key], redundancy)
        for key, parts in _over_heads(self._parts, ranks).items():
            found[key] = pooled(key[1], folded(key[1], parts))
        return found


def accumulator_rows(
    probed: Sequence[ProbedRequest], ranks: Ranks
) -> list[tuple[ProbedRequest, torch.Tensor]]:
    """The probed requests that still have an accumulator, each with the rows to add to it.

    A non-linear signal needs rows over the heads of all ranks. Scores of linear signals are summed
    when they are reported, which is rarer and less data. Ranks that differ exchange nothing.
    """
    parts = {(p.request_id, p.signal): p.rows for p in probed if p.rows is not None}
    linear = {key: rows for key, rows in parts.items() if key[1].is_linear}
    reduced = _over_heads({key: v for key, v in parts.items() if key not in linear}, ranks)
    found = []
    for request in probed:
        key = request.request_id, request.signal
        rows = linear.get(key) if key in linear else reduced.get(key)
        if rows is not None and request.signal in request.mirror.accumulators:
            found.append((request, folded(request.signal, rows)))
    return found


def _over_heads(
    parts: dict[SignalKey, torch.Tensor], ranks: Ranks
) -> dict[SignalKey, torch.Tensor]:
    """`parts` of every rank, reduced over the heads of all ranks."""
    maxima = {key: v for key, v in parts.items() if key[1].over_heads == "max"}
    means = {key: v for key, v in parts.items() if key not in maxima}
    return ranks.sum(means) | ranks.max(maxima)
