"""Copies of K and V of token slots to host slots and back, beside the forward and the relocations.

    main        … forward n-1 | sampling, inputs n | wait ──────────► forward n …
                              └─ event ─┐                          ▲
    relocation                          └─► gather ► relocate ► scatter
                                                └─ event ─┐   ▲ event
    park                                  upload ─────────│───┘
                                                          └─► download

A token that is parked leaves its slot for a row of `transit`, which is a copy within the device.
From there the park stream downloads it into page-locked memory of the host (`host_slabs`). So
neither the relocations nor the forward wait for the bus. A restored token takes the opposite way,
and the forward waits for it. The host never waits.

Why this is safe (I1, I3), beside what `staged_copy` has:

1. A slot is gathered before anything overwrites it: relocations and scatters of the step come after
   it on the relocation stream, and writes of vLLM and of forward n after the main stream's wait.
2. A download reads gathered rows, because the park stream waits for the gather's event; a scatter
   reads uploaded rows, because the relocation stream waits for the upload's event.
3. Rows of `transit` are filled again only after they were emptied, see there.
4. An upload reads what was downloaded to its host slot. Downloads and uploads are on one stream, so
   they run in the order of the plans, in which a token is parked before it is restored.
5. A host slot of a restored token may get another owner in the next step, and no sooner. The
   upload for the old owner and the download for the new one are on one stream, in the order of the
   plans. The host itself never reads or writes the memory.
6. A scatter overwrites no slot that is still read. Its destinations are dead or fresh in step n:
   forward n-1 and earlier have ended, and a token that is parked from there was gathered before.
7. Forward n reads restored tokens after the scatter: the main stream waits for the newest of the
   step's copies.
8. The memory of transit and slabs, which may be refused, is taken before the first launch. So the
   copies of a step are made entirely or not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.vllm.cuda.copies.host_slabs import HostSlabs
from vtoken.vllm.cuda.copies.staged_copy import StagedCopies
from vtoken.vllm.cuda.copies.streams import Stream, Streams
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.copies.transit import Transit
from vtoken.vllm.cuda.layout import slot_rows


class HostRows(Protocol):
    """Copies between slots [k] int64 and `rows` [k, L, row], which have all layers of a token."""

    def gather(self, slots: torch.Tensor, rows: torch.Tensor) -> None: ...

    def scatter(self, rows: torch.Tensor, slots: torch.Tensor) -> None: ...


class TorchHostRows:
    """With torch's index operations, on any device; `layers`: one [N * S, row] each."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = layers

    def gather(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        for number, layer in enumerate(self._layers):
            rows[:, number].copy_(layer.index_select(0, slots))

    def scatter(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        for number, layer in enumerate(self._layers):
            layer.index_copy_(0, slots, rows[:, number])


class BusTime:
    """The bus's time for a token in one direction, by the newest transfer that has finished."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._us_a_token: float | None = None
        self._running: deque[tuple[Any, Any, int]] = deque()

    def add(self, start: Any, end: Any, num_tokens: int) -> None:
        """A transfer of `num_tokens` was launched between these timed events."""
        self._running.append((start, end, num_tokens))

    def us_a_token(self) -> float | None:
        """None before one has finished."""
        while self._running:
            start, end, num_tokens = self._running[0]
            us = self._streams.elapsed_us(start, end)
            if us is None:
                break
            self._us_a_token = us / num_tokens
            self._running.popleft()
        return self._us_a_token


class CUDAHostCopies:
    """The host slots of one worker, with the layers or heads that it has.

    `caches`: one [N, H, S, C] a layer, in layout LBNHC (else UnsupportedError); `stages`: of their
    relocations.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        stages: StagedCopies,
        streams: Streams,
        *,
        use_triton: bool,
    ) -> None:
        layers = [slot_rows(cache) for cache in caches]
        row, dtype, self._device = layers[0].shape[1], layers[0].dtype, layers[0].device
        self.rows: HostRows = TorchHostRows(layers)
        if use_triton:
            from vtoken.vllm.cuda.kernels import TritonHostRows

            self.rows = TritonHostRows(layers)
        self._stages, self._streams = stages, streams
        self._transit = Transit(layers, streams)
        self._slabs = HostSlabs(len(layers) * row, dtype, pinned=self._device.type != "cpu")
        self._downloads, self._uploads = BusTime(streams), BusTime(streams)

    def park(self, slots: Ints, hosts: Ints) -> int:
        """Launch the copies of `slots` [k] to host slots `hosts` [k], before any relocation.

        Returns the bus's time for as many tokens in µs, by the newest transfer that has finished; 0
        before one has. Raises MemoryError, with nothing launched, if the host or the device refuses
        memory.
        """
        self._take_memory(int(hosts.max()) + 1)
        streams: Streams = self._streams
        start: Any = None
        for own, places in self._chunks(slots, hosts):
            rows = self._transit.take(len(own), Stream.RELOCATION)
            gathered = self._stages.launch(partial(self._gather, own, rows))
            streams.wait(Stream.PARK, gathered)
            if start is None:
                start = streams.record(Stream.PARK, timed=True)
            streams.launch(Stream.PARK, partial(self._download, rows, places))
            self._transit.ended(Stream.PARK)
        self._downloads.add(start, streams.record(Stream.PARK, timed=True), len(slots))
        return round((self._downloads.us_a_token() or 0.0) * len(slots))

    def restore(self, hosts: Ints, slots: Ints) -> int:
        """Launch the copies of host slots `hosts` [m] to `slots` [m], after all relocations.

        Returns the bus's time as `park` does; before a transfer to the device has finished, by the
        newest to the host. Raises IndexError, with nothing launched, for a host slot without
        memory, to which nothing was copied.
        """
        self._slabs.check(hosts)
        streams = self._streams
        start = streams.record(Stream.PARK, timed=True)
        for own, places in self._chunks(slots, hosts):
            rows = self._transit.take(len(own), Stream.PARK)
            streams.launch(Stream.PARK, partial(self._upload, places, rows))
            end = streams.record(Stream.PARK, timed=True)
            streams.wait(Stream.RELOCATION, end)
            self._stages.launch(partial(self._scatter, rows, own))
            self._transit.ended(Stream.RELOCATION)
        self._uploads.add(start, end, len(slots))
        rate = self._uploads.us_a_token() or self._downloads.us_a_token() or 0.0
        return round(rate * len(slots))

    def limit(self, capacity: int) -> None:
        """Free the host memory of slots from `capacity` on, except in a slab with others."""
        if self._slabs.limit(capacity) and self._device.type == "cuda":
            torch.accelerator.empty_host_cache()  # else torch keeps it for itself

    def _take_memory(self, num_hosts: int) -> None:
        try:
            self._transit.make()
        except Exception as error:
            raise MemoryError(f"the device has no memory for parking: {error}") from error
        try:
            self._slabs.reserve(num_hosts)
        except Exception as error:
            raise MemoryError(f"the host refused memory for parking: {error}") from error

    def _chunks(self, slots: Ints, hosts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Parts of `slots` and `hosts` in the order of host slots, each of at most `max_rows`."""
        order = np.argsort(hosts)
        for first in range(0, len(order), self._transit.max_rows):
            part = order[first : first + self._transit.max_rows]
            yield slots[part], hosts[part]

    def _gather(self, slots: Ints, rows: torch.Tensor) -> None:
        self.rows.gather(upload(slots, self._device), rows)

    def _scatter(self, rows: torch.Tensor, slots: Ints) -> None:
        self.rows.scatter(rows, upload(slots, self._device))

    def _download(self, rows: torch.Tensor, hosts: Ints) -> None:
        flat = rows.flatten(1)
        for first, memory in self._slabs.runs(hosts):
            memory.copy_(flat[first : first + len(memory)], non_blocking=True)

    def _upload(self, hosts: Ints, rows: torch.Tensor) -> None:
        flat = rows.flatten(1)
        for first, memory in self._slabs.runs(hosts):
            flat[first : first + len(memory)].copy_(memory, non_blocking=True)
