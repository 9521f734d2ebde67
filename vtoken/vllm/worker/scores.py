"""From a step's attention rows to the numbers in its report: accumulators are fed, signals are told.

Knows mirrors, ranks and tensors; neither the runner nor the attention layer that made the rows.
`HostScores` does it where everything is on the host; a device has its own way (`cuda.scores`).

What is told is told by token id: ids are taken when the rows are, in the same step, and never
change afterwards. So however late the numbers reach the host, whatever was appended, evicted or
moved in the meantime, none of them becomes another token's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from vtoken.arrays import Floats, Ints
from vtoken.policies.signals import Accumulator, Signal, by_id, make_accumulator
from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import StepPlan
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


class Scores(Protocol):
    """What a worker does with the rows of its probes."""

    def make_accumulator(self, signal: Signal) -> Accumulator[Any]:
        """The accumulator of an attention signal."""

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
    ) -> PendingScores:
        """After the step's forward: feed the accumulators with `probed`, and tell what `plan` wants.

        The answer, asked once and by any thread, is `WorkerReport.scores`; it may wait for the
        device.
        """


class HostScores:
    """Accumulators of numpy arrays. `keys(layer)` is the layer's keys as a view [N, S, Hkv, D], read by
    `num_heads` query heads of this rank.
    """

    def __init__(self, keys: Keys, num_heads: int) -> None:
        self._keys = keys
        self._num_heads = num_heads

    def make_accumulator(self, signal: Signal) -> Accumulator[Floats]:
        return make_accumulator(signal)

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
    ) -> PendingScores:
        for request, rows in settled(probed, ranks):
            request.mirror.accumulators[request.signal].add(
                request.ids, rows.numpy(), request.num_new
            )
        wanted = Wanted(plan, mirrors, torch.from_numpy)
        for asked, accumulator in wanted.of_attention():
            scores = accumulator.scores()
            if scores is not None:
                wanted.add(asked, torch.from_numpy(scores), accumulator.ids, accumulator.num_tokens)
        wanted.read_keys(self._keys, self._num_heads, ranks)
        found, owners = wanted.over(ranks), wanted.owners
        told = {
            asked: by_id(owners[asked][0], values.numpy(), owners[asked][1])
            for asked, values in found.items()
        }
        return lambda: told


class Wanted:
    """The numbers that a plan wants reported, gathered on one rank and put together over all.

    `owners`: the ids [n] that the numbers belong to, and how many tokens the request has then.
    `upload` brings numbers of the host to where the cache is.
    """

    def __init__(self, plan: StepPlan, mirrors: Mapping[str, Mirror], upload: Upload) -> None:
        self._upload = upload
        self._mirrors = mirrors
        self._asked = [
            (asked, mirrors[asked[0]]) for asked in plan.want_scores if asked[0] in mirrors
        ]
        self._values: dict[SignalKey, torch.Tensor] = {}
        self._parts: dict[
            SignalKey, torch.Tensor
        ] = {}  # of signals of keys, as `key_values` has them
        self._slots: dict[SignalKey, Ints] = {}  # of the live tokens, where redundancy is mixed in
        self._redundancy: dict[SignalKey, torch.Tensor] = {}  # of those that have a number
        self.owners: dict[SignalKey, tuple[Ints, int]] = {}

    def of_attention(self) -> Iterator[tuple[SignalKey, Accumulator[Any]]]:
        """The accumulator of each signal of attention."""
        for asked, mirror in self._asked:
            accumulator = mirror.accumulators.get(asked[1])
            if accumulator is not None:
                yield asked, accumulator

    def add(self, asked: SignalKey, values: torch.Tensor, ids: Ints, num_tokens: int) -> None:
        """`values` [n] are the numbers of `ids` [n] by this rank's accumulator."""
        if asked[1].is_mixed:
            live, self._slots[asked] = self._mirrors[asked[0]].live()
            known = live[: np.searchsorted(live, num_tokens)]
            if len(known) < len(ids):  # some died since the newest probe
                values = values.index_select(0, self._upload(np.searchsorted(ids, known)))
                ids = known
        self._values[asked], self.owners[asked] = values, (ids, num_tokens)

    def read_keys(self, keys: Keys, num_heads: int, ranks: Ranks) -> None:
        """The signals of keys, and the redundancy of the tokens that were added."""
        for asked, mirror in self._asked:
            if asked[1].of_keys:
                ids, slots = mirror.live()
                self.owners[asked] = ids, mirror.num_tokens
                layers = [keys(layer) for layer in asked[1].layers]
                self._parts[asked] = key_values(
                    asked[1], self._upload(slots), layers, num_heads, ranks.heads
                )
        for asked, slots in self._slots.items():
            layers = [keys(layer) for layer in asked[1].layers]
            of_live = key_redundancy(asked[1], self._upload(slots), layers, num_heads, ranks.heads)
            self._redundancy[asked] = of_live[: len(self.owners[asked][0])]

    def over(self, ranks: Ranks) -> dict[SignalKey, torch.Tensor]:
        """All numbers [n], of the heads of all ranks; none where ranks differ.

        An accumulator whose signal is not linear was fed with the rows of all ranks, see `settled`.
        """
        linear = {asked: v for asked, v in self._values.items() if asked[1].is_linear}
        found = ranks.total(linear)
        if ranks.agreed:
            found |= {asked: v for asked, v in self._values.items() if asked not in linear}
        for asked, redundancy in ranks.total(self._redundancy).items():
            found[asked] = asked[1].mixed(found[asked], redundancy)
        for asked, parts in _over_heads(self._parts, ranks).items():
            found[asked] = pooled(asked[1], folded(asked[1], parts))
        return found


def settled(
    probed: Sequence[ProbedRequest], ranks: Ranks
) -> list[tuple[ProbedRequest, torch.Tensor]]:
    """The probed requests that are still kept, each with the rows that its accumulator takes.

    A signal that is not linear needs whole rows, over the heads of all ranks. The numbers of linear
    ones are added up when they are reported, which is rarer and less data. Ranks that differ share
    nothing.
    """
    parts = {(p.request_id, p.signal): p.rows for p in probed if p.rows is not None}
    linear = {asked: rows for asked, rows in parts.items() if asked[1].is_linear}
    whole = _over_heads({asked: v for asked, v in parts.items() if asked not in linear}, ranks)
    taken = []
    for request in probed:
        asked = request.request_id, request.signal
        rows = linear.get(asked) if asked in linear else whole.get(asked)
        if rows is not None and request.signal in request.mirror.accumulators:
            taken.append((request, folded(request.signal, rows)))
    return taken


def _over_heads(
    parts: dict[SignalKey, torch.Tensor], ranks: Ranks
) -> dict[SignalKey, torch.Tensor]:
    """`parts` of every rank put together over the heads of all."""
    greatest = {asked: v for asked, v in parts.items() if asked[1].over_heads == "max"}
    means = {asked: v for asked, v in parts.items() if asked not in greatest}
    return ranks.total(means) | ranks.greatest(greatest)
