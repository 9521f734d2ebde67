"""From a step's attention rows to the numbers in its report: keepers are fed, signals are told.

Knows mirrors, ranks and tensors; neither the runner nor the attention layer that made the rows.
`HostScores` does it where everything is on the host; a device has its own way (`cuda.scores`).

What is told is told by token id: ids are taken when the rows are, in the same step, and never
change afterwards. So however late the numbers reach the host, whatever was appended, evicted or
moved in the meantime, none of them becomes another token's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from vtoken.arrays import Floats
from vtoken.policies.signals import Keeper, Signal, by_id, make_keeper
from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import StepPlan
from vtoken.vllm.worker.probe import ProbedRequest, key_values
from vtoken.vllm.worker.ranks import Ranks

Asked = tuple[str, Signal]
Told = Callable[[], dict[Asked, Floats]]
Keys = Callable[[int], torch.Tensor]


class Scores(Protocol):
    """What a worker does with the rows of its probes."""

    def make_keeper(self, signal: Signal, layers: tuple[int, ...]) -> Keeper[Any]:
        """The keeper of an attention signal over the probed `layers`."""

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
    ) -> Told:
        """After the step's forward: feed the keepers with `probed`, and tell what `plan` wants.

        The answer, asked once and by any thread, is `WorkerReport.scores`; it may wait for the
        device.
        """


class HostScores:
    """Keepers of numpy arrays; `keys(layer)` is the layer's keys as a view [N, S, Hkv, D]."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def make_keeper(self, signal: Signal, layers: tuple[int, ...]) -> Keeper[Floats]:
        return make_keeper(signal, layers)

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
    ) -> Told:
        for request, rows in settled(probed, ranks):
            request.mirror.keepers[request.signal].add(request.ids, rows.numpy(), request.num_new)
        own = {}
        for request_id, signal in plan.want_scores:
            mirror = mirrors.get(request_id)
            if mirror is None:
                continue
            scores: Floats | None = None
            if signal.of_keys:
                ids, slots = mirror.live()
                layers = [self._keys(layer) for layer in plan.signal_layers]
                values = key_values(signal, torch.from_numpy(slots), layers)
                scores = by_id(ids, values.numpy(), mirror.num_tokens)
            elif signal in mirror.keepers:
                scores = mirror.keepers[signal].scores()
            if scores is not None:
                own[request_id, signal] = torch.from_numpy(scores)
        told = {asked: scores.numpy() for asked, scores in ranks.mean(own).items()}
        return lambda: told


def settled(
    probed: Sequence[ProbedRequest], ranks: Ranks
) -> list[tuple[ProbedRequest, torch.Tensor]]:
    """The probed requests that are still kept, each with the rows that its keeper takes.

    A hit is counted on a whole row, the mean over the heads of all ranks; other signals are means
    of the ranks' own, taken when they are told. Ranks that differ share nothing.
    """
    hits = {
        (p.request_id, p.signal): p.rows
        for p in probed
        if p.rows is not None and p.signal.kind == "attention_hits"
    }
    whole = ranks.mean(hits)
    taken = []
    for request in probed:
        asked = request.request_id, request.signal
        rows = whole.get(asked) if asked in hits else request.rows
        if rows is not None and request.signal in request.mirror.keepers:
            taken.append((request, rows))
    return taken
