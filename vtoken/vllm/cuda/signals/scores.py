"""From attention rows to the report on a device: the host only launches work.

    main     … forward n: queries │ rows │ accumulators │ readings │ outbox n ─┬─► sampling n │ …
    report                                                                     └─► to host ─ event

The worker's thread never waits. The thread that fetches the sampled tokens of step n also waits for
the event. It was recorded before sampling began, so the scores of step n are in the report of
step n.

Invariants:
1. each step copies an outbox of its own to the host; later steps write accumulators, not the outbox
2. ids are those of the step that made the scores (`vtoken.vllm.worker.scores`), at its launch
3. the downloaded scores are read only after the event
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vtoken.base.arrays import Floats, Ints
from vtoken.core.protocol.mirror import Mirrors
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Accumulator, Signal, by_id
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.copies.streams import Stream, Streams
from vtoken.vllm.cuda.copies.transfer import download, upload
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.accumulators import DeviceAccumulator
from vtoken.vllm.cuda.signals.constants import Constants
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.cuda.signals.probing import DeviceProbe
from vtoken.vllm.cuda.signals.readings import SignalReadings
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import PendingScores, Scores
from vtoken.vllm.worker.stages import Owners, SignalKey, Tensors


class DeviceScores(Scores):
    """Accumulators on the device of `layers`, whose keys are read through `tables`.

    A step calls `put`, then sends `staging`, then computes the forward with `probe`, then calls
    `finish`.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        tables: PageTables,
        staging: Staging,
        streams: Streams,
    ) -> None:
        super().__init__(lambda number: layers[number].key, layers[0].num_heads)
        self._layers, self._tables = layers, tables
        self._staging, self._streams = staging, streams
        self._device = layers[0].key.device
        self._constants = Constants(self._device)
        self._anchors: dict[Signal, torch.Tensor] = {}
        self.probe: DeviceProbe | None = None  # of the step whose forward has not ended
        self._readings: SignalReadings | None = None

    def make_accumulator(self, signal: Signal) -> Accumulator:
        return DeviceAccumulator(signal, self._device)

    def put(
        self,
        probed: Sequence[ProbedRequest],
        plan: StepPlan,
        mirrors: Mirrors,
        rows: Mapping[str, int],
        ranks: Ranks,
    ) -> None:
        """Stage what the step's probes and readings need; `rows`: request -> row of the batch."""
        self.probe = self._readings = None
        if probed:
            self.probe = DeviceProbe(
                *(probed, rows, self._layers, self._tables, self._staging, self._constants, ranks)
            )
        if plan.want_scores and ranks.agreed:
            in_torch = {p.request_id for p in self.probe.in_torch} if self.probe else set()
            self._readings = SignalReadings(
                self._layers, self._constants, self._anchors, len(self._tables.pages)
            )
            self._readings.put(
                *(plan.want_scores, mirrors, rows, in_torch, self._staging, ranks.heads)
            )

    def _by_kernels(
        self, probed: Sequence[ProbedRequest], wanted: Sequence[SignalKey], ranks: Ranks
    ) -> tuple[Sequence[ProbedRequest], Sequence[SignalKey]]:
        probe, self.probe = self.probe, None
        if probe is not None:
            probe.run(ranks)
            probed = probe.in_torch
        if self._readings is not None:
            self._readings.run(self._tables.pages, ranks)
            wanted = [key for key in wanted if key not in self._readings.owners]
        return probed, wanted

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _upload(self, array: Ints) -> torch.Tensor:
        return upload(array, self._device)

    def _send(self, values: Tensors, owners: Owners) -> PendingScores:
        readings, self._readings = self._readings, None
        owners = {key: owners[key] for key in values}
        outbox: torch.Tensor | None = None
        if readings is not None:
            owners, outbox = readings.owners | owners, readings.outbox
        if not owners:
            return dict
        sent = outbox
        if values or sent is None:
            sent = torch.cat([*([] if outbox is None else [outbox]), *values.values()])
        streams = self._streams
        downloads: list[torch.Tensor] = []
        streams.wait(Stream.REPORT, streams.record(Stream.MAIN))
        streams.launch(Stream.REPORT, lambda: downloads.append(download(sent)))
        streams.keep(sent, Stream.REPORT)
        event = streams.record(Stream.REPORT)

        def pending() -> dict[Any, Floats]:
            streams.synchronize(event)
            found = downloads[0].split([len(ids) for ids, _ in owners.values()])
            return {
                key: by_id(ids, part.numpy(), num_tokens)
                for (key, (ids, num_tokens)), part in zip(owners.items(), found, strict=True)
            }

        return pending
