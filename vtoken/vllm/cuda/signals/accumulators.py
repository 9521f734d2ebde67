"""Accumulators on the device: they aggregate a request's attention without reading it back.

They compute the same scores as the host's accumulators (`vtoken.policies.signals`), which are their
oracle in the tests. Inputs are tensors on the device and the live ids on the host.

Column j of an accumulator's `_data` belongs to the j-th live token in logical order. When tokens
die, the remaining columns are compacted; slots in the cache do not matter. Invariant: columns
beyond the last live token are zero, because earlier queries give a new token no attention.

    attention_sum      1 row, float32             4 bytes a live token
    attention_window   W rows, float32            4 W bytes
    attention_max      W rows, float32            4 W bytes
    attention_hits     W rows, one byte a query   W bytes
    attention_last     the newest row
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.arrays import Ints
from vtoken.policies.signals import Accumulator, Kind, Signal
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.worker.probe import pooled


class DeviceAccumulator(Accumulator[torch.Tensor]):
    """An accumulator whose scores are on the device."""

    def __init__(self, signal: Signal, device: torch.device) -> None:
        super().__init__(signal)
        self._device = device

    def _pooled(self, values: torch.Tensor) -> torch.Tensor:
        return pooled(self.signal, values)


class DeviceLastAccumulator(DeviceAccumulator):
    def _add(self, ids: Ints, rows: torch.Tensor) -> None:  # noqa: ARG002
        self._row = rows[-1]

    def _scores(self) -> torch.Tensor:
        return self._row


class ColumnsAccumulator(DeviceAccumulator):
    """Keeps `_data` [rows, capacity]; the capacity follows the number of live tokens."""

    _num_rows = 1
    _dtype = torch.float32

    def __init__(self, signal: Signal, device: torch.device) -> None:
        super().__init__(signal, device)
        self._data = torch.zeros((self._num_rows, 0), dtype=self._dtype, device=device)
        self._next = 0  # the row 0 .. W - 1 of the window that is written next

    def _align(self, ids: Ints) -> torch.Tensor:
        """Make column j that of `ids[j]`; return the columns in use [rows, n]."""
        before, num_ids = self.ids, len(ids)
        known = int(np.searchsorted(ids, before[-1] + 1)) if len(before) else 0
        kept = self._data[:, : len(before)]
        tokens_died = known < len(before)
        if tokens_died:
            columns = np.searchsorted(before, ids[:known])
            kept = kept.index_select(1, upload(columns, self._device))
        if not num_ids <= self._data.shape[1] <= 4 * num_ids + 64:
            shape = (self._num_rows, num_ids + num_ids // 4 + 16)
            self._data = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._data[:, :known] = kept
        elif tokens_died:
            self._data[:, :known] = kept
            self._data[:, known : len(before)] = 0
        return self._data[:, :num_ids]

    def _write(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite the window's k oldest queries with `rows` [k, n]."""
        window, first, num_rows = self._num_rows, self._next, len(rows)
        fits = min(num_rows, window - first)
        columns[first : first + fits] = rows[:fits]
        if fits < num_rows:
            columns[: num_rows - fits] = rows[fits:]
        self._next = (first + num_rows) % window


class DeviceSumAccumulator(ColumnsAccumulator):
    def _add(self, ids: Ints, rows: torch.Tensor) -> None:
        self._align(ids)[0].add_(rows[0])

    def _scores(self) -> torch.Tensor:
        return self._data[0, : len(self.ids)]


class DeviceWindowAccumulator(ColumnsAccumulator):
    def __init__(self, signal: Signal, device: torch.device) -> None:
        self._num_rows = signal.window_queries
        super().__init__(signal, device)

    def _add(self, ids: Ints, rows: torch.Tensor) -> None:
        self._write(self._align(ids), rows)

    def _scores(self) -> torch.Tensor:
        rows = min(self.num_queries, self.signal.window_queries)
        kept = self._data[:rows, : len(self.ids)]
        return kept.amax(dim=0) if self.signal.kind == "attention_max" else kept.mean(dim=0)


class DeviceHitsAccumulator(ColumnsAccumulator):
    _dtype = torch.uint8

    def __init__(self, signal: Signal, device: torch.device) -> None:
        self._num_rows = signal.window_queries
        super().__init__(signal, device)

    def _add(self, ids: Ints, rows: torch.Tensor) -> None:
        num_rows, num_ids = rows.shape
        num_seen = torch.arange(
            num_ids - num_rows + 1, num_ids + 1, dtype=torch.float32, device=self._device
        )
        self._write(self._align(ids), rows * num_seen[:, None] >= 1)

    def _scores(self) -> torch.Tensor:
        return self._data[:, : len(self.ids)].sum(dim=0, dtype=torch.float32)


_ACCUMULATORS: dict[Kind, type[DeviceAccumulator]] = {
    "attention_sum": DeviceSumAccumulator,
    "attention_last": DeviceLastAccumulator,
    "attention_window": DeviceWindowAccumulator,
    "attention_max": DeviceWindowAccumulator,
    "attention_hits": DeviceHitsAccumulator,
}


def make_device_accumulator(signal: Signal, device: torch.device) -> DeviceAccumulator:
    """The accumulator of an attention signal, on `device`."""
    return _ACCUMULATORS[signal.kind](signal, device)
