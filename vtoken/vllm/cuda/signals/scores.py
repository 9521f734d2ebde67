"""From attention rows to the report on a device: the host launches it all and looks at nothing.

    main     … forward n: rows │ accumulators │ mean over ranks │ outbox n ─┬─► sampling n │ forward …
    report                                                            └─► outbox n to host ─ event

The worker's thread never waits. Whoever fetches the sampled tokens of step n waits for the event
too: it was recorded before sampling began, so the scores of step n are in the report of step n.

Invariants:
1. what is copied to the host is an outbox of this step's own: later steps write accumulators, not it
2. ids are those of the step that made the numbers (`vtoken.vllm.worker.scores`), at its launch
3. all that reads the device's answer is behind the event
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from vtoken.arrays import Floats, Ints
from vtoken.policies.signals import Signal, by_id
from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import StepPlan
from vtoken.vllm.cuda.copies.streams import Stream, Streams
from vtoken.vllm.cuda.copies.transfer import download, upload
from vtoken.vllm.cuda.signals.accumulators import DeviceAccumulator, make_device_accumulator
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import Keys, PendingScores, SignalKey, Wanted, settled


class DeviceScores:
    """Accumulators on `device`. `keys(layer)` is the layer's keys as a view [N, S, Hkv, D], read by
    `num_heads` query heads of this rank.
    """

    def __init__(self, keys: Keys, num_heads: int, device: torch.device, streams: Streams) -> None:
        self._keys = keys
        self._num_heads = num_heads
        self._device = device
        self._streams = streams

    def make_accumulator(self, signal: Signal) -> DeviceAccumulator:
        return make_device_accumulator(signal, self._device)

    def finish(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mapping[str, Mirror],
        ranks: Ranks,
    ) -> PendingScores:
        for request, rows in settled(probed, ranks):
            request.mirror.accumulators[request.signal].add(request.ids, rows, request.num_new)
        wanted = Wanted(plan, mirrors, lambda numbers: upload(numbers, self._device))
        for asked, accumulator in wanted.of_attention():
            scores = accumulator.scores()
            if scores is not None:
                wanted.add(asked, scores, accumulator.ids, accumulator.num_tokens)
        wanted.read_keys(self._keys, self._num_heads, ranks)
        return self._send(wanted.over(ranks), wanted.owners)

    def _send(
        self, values: Mapping[SignalKey, torch.Tensor], owners: Mapping[SignalKey, tuple[Ints, int]]
    ) -> PendingScores:
        """`values[asked]` [n] are on their way; they belong to the tokens that `owners` names."""
        if not values:
            return dict
        streams = self._streams
        outbox = _outbox(values.values())
        arrived: list[torch.Tensor] = []
        streams.wait(Stream.REPORT, streams.record(Stream.MAIN))
        streams.launch(Stream.REPORT, lambda: arrived.append(download(outbox)))
        event = streams.record(Stream.REPORT)

        def told() -> dict[SignalKey, Floats]:
            streams.synchronize(event)
            parts = arrived[0].split([len(owners[asked][0]) for asked in values])
            return {
                asked: by_id(owners[asked][0], part.numpy(), owners[asked][1])
                for asked, part in zip(values, parts, strict=True)
            }

        return told


def _outbox(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """All `values`, one behind the other, in a tensor that nobody else writes."""
    return torch.cat([*values])
