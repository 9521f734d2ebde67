"""From attention rows to the report on a device: the host only launches work.

    main     … forward n: rows │ accumulators │ mean over ranks │ outbox n ─┬─► sampling n │ …
    report                                                                  └─► to host ─ event

The worker's thread never waits. The thread that fetches the sampled tokens of step n also waits for
the event. It was recorded before sampling began, so the scores of step n are in the report of
step n.

Invariants:
1. each step copies an outbox of its own to the host; later steps write accumulators, not the outbox
2. ids are those of the step that made the scores (`vtoken.vllm.worker.scores`), at its launch
3. the downloaded scores are read only after the event
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from vtoken.base.arrays import Floats, Ints
from vtoken.policies.signals import Accumulator, Signal, by_id, make_accumulator
from vtoken.vllm.cuda.copies.streams import Stream, Streams
from vtoken.vllm.cuda.copies.transfer import download, upload
from vtoken.vllm.cuda.signals.accumulators import DeviceArrays
from vtoken.vllm.worker.scores import Keys, PendingScores, Scores
from vtoken.vllm.worker.stages import Owners, SignalKey


class DeviceScores(Scores):
    """Accumulators on `device`."""

    def __init__(self, keys: Keys, num_heads: int, device: torch.device, streams: Streams) -> None:
        super().__init__(keys, num_heads)
        self._device = device
        self._arrays = DeviceArrays(device)
        self._streams = streams

    def make_accumulator(self, signal: Signal) -> Accumulator:
        return make_accumulator(signal, self._arrays)

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _upload(self, array: Ints) -> torch.Tensor:
        return upload(array, self._device)

    def _send(self, values: Mapping[SignalKey, torch.Tensor], owners: Owners) -> PendingScores:
        if not values:
            return dict
        streams = self._streams
        outbox = _outbox(values.values())
        downloads: list[torch.Tensor] = []
        streams.wait(Stream.REPORT, streams.record(Stream.MAIN))
        streams.launch(Stream.REPORT, lambda: downloads.append(download(outbox)))
        streams.keep(outbox, Stream.REPORT)
        event = streams.record(Stream.REPORT)

        def pending() -> dict[SignalKey, Floats]:
            streams.synchronize(event)
            parts = downloads[0].split([len(owners[key][0]) for key in values])
            return {
                key: by_id(owners[key][0], part.numpy(), owners[key][1])
                for key, part in zip(values, parts, strict=True)
            }

        return pending


def _outbox(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """All `values` concatenated in a new tensor, which later steps do not write."""
    return torch.cat([*values])
