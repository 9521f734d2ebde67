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
from vtoken.policies.signals import Accumulator, Signal, by_id
from vtoken.vllm.worker.probe import (
    ProbedRequest,
    folded,
    key_redundancy,
    key_values,
    pooled,
)
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.stages import ONE_STAGE, Owners, Shares, SignalKey, Stages, Tensors

PendingScores = Callable[[], dict[SignalKey, Floats]]
Keys = Callable[[int], torch.Tensor]
Upload = Callable[[Ints], torch.Tensor]


class Scores:
    """Turns the rows of a worker's probes into scores.

    `keys(layer)` is the layer's keys as a view [N, S, Hkv, D], read by `num_heads` query heads of
    this rank. A host and a device differ in the methods that they define.
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

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
        stages: Stages = ONE_STAGE,
        shares: Shares | None = None,
    ) -> PendingScores:
        """After the step's forward: feed `probed` to the accumulators; gather what `plan` requests.

        Adds this stage's part to the `shares` of the earlier ones. On the last stage the result,
        called once and from any thread, returns `WorkerReport.scores`; it may wait for the device.
        """
        shares = Shares() if shares is None else shares
        probed, wanted = self._by_kernels(probed, plan.want_scores, ranks)
        for request, rows in accumulator_rows(probed, ranks, stages, shares):
            accumulator = request.mirror.accumulators[request.signal]
            accumulator.add(request.ids, self._rows(rows), request.num_new)
        requested = RequestedScores(wanted, mirrors, self._upload, stages)
        requested.read_accumulators()
        requested.read_keys(self._keys, self._num_heads, ranks)
        requested.add_to(shares, ranks)
        complete = stages.is_last and stages.agreed
        return self._send(completed(shares) if complete else {}, shares.owners)

    def _by_kernels(
        self,
        probed: Sequence[ProbedRequest],
        wanted: Sequence[SignalKey],
        ranks: Ranks,  # noqa: ARG002
    ) -> tuple[Sequence[ProbedRequest], Sequence[SignalKey]]:
        """Launch the kernels for all requests at once; what they leave of `probed` and `wanted`."""
        return probed, wanted

    def _send(self, values: Tensors, owners: Owners) -> PendingScores:
        """Start the transfer of `values[key]` [n], which belong to the tokens in `owners[key]`, and
        of what kernels read.
        """
        raise NotImplementedError


class HostScores(Scores):
    """Accumulators of numpy arrays."""

    def make_accumulator(self, signal: Signal) -> Accumulator:
        return Accumulator(signal)

    def _rows(self, rows: torch.Tensor) -> Floats:
        array: Floats = rows.numpy()
        return array

    def _upload(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array)

    def _send(self, values: Tensors, owners: Owners) -> PendingScores:
        scores = {
            key: by_id(owners[key][0], found.numpy(), owners[key][1])
            for key, found in values.items()
        }
        return lambda: scores


class RequestedScores:
    """The `wanted` scores, gathered on one rank and reduced over the ranks of a stage.

    `upload` copies a host array to the cache's device.
    """

    def __init__(
        self,
        wanted: Sequence[SignalKey],
        mirrors: Mapping[str, Mirror],
        upload: Upload,
        stages: Stages,
    ) -> None:
        self._upload = upload
        self._stages = stages
        self._requested = [
            (key, mirrors[key[0]])
            for key in wanted
            if key[0] in mirrors and stages.own_layers(key[1])
        ]
        self._values: Tensors = {}
        self._parts: Tensors = {}  # of key signals, from `key_values`
        self._slots: dict[SignalKey, Ints] = {}  # of the live tokens, for signals with redundancy
        self._redundancy: Tensors = {}  # of the live tokens
        self._owners: Owners = {}

    def read_accumulators(self) -> None:
        """Read the attention signals from this rank's accumulators."""
        for key, mirror in self._requested:
            accumulator = mirror.accumulators.get(key[1])
            scores = None if accumulator is None else accumulator.scores()
            if accumulator is None or scores is None:
                if key[1].is_mixed and not self._stages.is_home(key[1]):
                    _, self._slots[key] = mirror.live()  # a later stage may have them
                continue
            values, ids, num_tokens = (
                torch.as_tensor(scores),
                accumulator.ids,
                accumulator.num_tokens,
            )
            if key[1].is_mixed:
                live, self._slots[key] = mirror.live()
                known = live[: np.searchsorted(live, num_tokens)]
                if not np.array_equal(known, ids):  # some died since the newest probe, or came back
                    values = self._reordered(values, ids, known)
                    ids = known
            self._values[key], self._owners[key] = values, (ids, num_tokens)

    def _reordered(self, values: torch.Tensor, ids: Ints, known: Ints) -> torch.Tensor:
        """The `values` [n] of the tokens `ids` [n] as those of `known` [m]; infinite for others."""
        padded = torch.nn.functional.pad(values, (0, 1), value=float("inf"))
        places = np.searchsorted(ids, known)
        places[ids.take(places, mode="clip") != known] = len(ids)
        return padded.index_select(0, self._upload(places))

    def read_keys(self, keys: Keys, num_heads: int, ranks: Ranks) -> None:
        """Compute the key signals, and the redundancy of the tokens that were added."""
        for key, mirror in self._requested:
            if key[1].of_keys:
                ids, slots = mirror.live()
                self._owners[key] = ids, mirror.num_tokens
                layers = {i: keys(n) for i, n in self._stages.own_layers(key[1]).items()}
                anchors, num_new = None, 0
                if key[1].anchor == "seen":
                    seen = mirror.seen[key[1]]
                    anchors, num_new = seen.anchors, seen.advance(ids, mirror.num_tokens)
                self._parts[key] = key_values(
                    key[1], self._upload(slots), layers, num_heads, ranks.heads, anchors, num_new
                )
        for key, slots in self._slots.items():
            own = [keys(layer) for layer in self._stages.own_layers(key[1]).values()]
            self._redundancy[key] = key_redundancy(
                key[1], self._upload(slots), own, num_heads, ranks.heads
            )

    def add_to(self, shares: Shares, ranks: Ranks) -> None:
        """Add all scores, over the heads of all ranks, to `shares`; nothing if ranks differ.

        The accumulator of a non-linear signal already holds the rows of all ranks, see
        `accumulator_rows`.
        """
        linear = {key: v for key, v in self._values.items() if key[1].is_linear}
        found = ranks.sum(linear)
        if ranks.agreed:
            found |= {key: v for key, v in self._values.items() if key not in linear}
        _merge(shares.values, found)
        _merge(shares.redundancy, ranks.sum(self._redundancy))
        _merge(shares.parts, _over_heads(self._parts, ranks), by_heads=True)
        shares.owners |= self._owners


def completed(shares: Shares) -> Tensors:
    """All scores [n], from the shares of all stages."""
    found = shares.values
    for key, redundancy in shares.redundancy.items():
        if key in found:
            found[key] = key[1].mixed(found[key], redundancy[: len(found[key])])
    for key, parts in shares.parts.items():
        found[key] = pooled(key[1], folded(key[1], parts))
    return found


def accumulator_rows(
    probed: Sequence[ProbedRequest], ranks: Ranks, stages: Stages, shares: Shares
) -> list[tuple[ProbedRequest, torch.Tensor]]:
    """The probed requests that still have an accumulator, each with the rows to add to it.

    A non-linear signal needs rows over the heads of all ranks, and over its layers on all stages:
    `shares` has those of earlier stages, and gets those that a later one needs. Scores of linear
    signals are summed when they are reported, which is rarer and less data. Ranks that differ
    exchange nothing.
    """
    parts = {(p.request_id, p.signal): p.rows for p in probed if p.rows is not None}
    linear = {key: rows for key, rows in parts.items() if key[1].is_linear}
    _merge(
        shares.rows,
        _over_heads({key: v for key, v in parts.items() if key not in linear}, ranks),
        by_heads=True,
    )
    reduced = {key: shares.rows.pop(key) for key in [*shares.rows] if stages.is_home(key[1])}
    found = []
    for request in probed:
        key = request.request_id, request.signal
        rows = linear.get(key) if key in linear else reduced.get(key)
        if rows is not None and request.signal in request.mirror.accumulators:
            found.append((request, folded(request.signal, rows)))
    return found


def _merge(into: Tensors, more: Tensors, *, by_heads: bool = False) -> None:
    """Add `more` to the tensors of the same signals in `into`; where heads are aggregated by their
    maximum and `by_heads`, take the maximum.
    """
    for key, tensor in more.items():
        if key not in into:
            into[key] = tensor
        elif by_heads and key[1].over_heads == "max":
            into[key] = torch.maximum(into[key], tensor)
        else:
            into[key] = into[key] + tensor


def _over_heads(parts: Tensors, ranks: Ranks) -> Tensors:
    """`parts` of every rank, reduced over the heads of all ranks."""
    maxima = {key: v for key, v in parts.items() if key[1].over_heads == "max"}
    means = {key: v for key, v in parts.items() if key not in maxima}
    return ranks.sum(means) | ranks.max(maxima)
