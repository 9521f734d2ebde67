"""Accumulators on a device: they aggregate a request's attention without reading it back.

Rows are tensors on the device, live ids are on the host. Chunks, and kinds without a kernel, are
added in torch. Single queries of the other kinds are added by one launch for all requests
(`Additions`), for which the host keeps the same account.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.policies.signals import Accumulator, Signal
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.worker.probe import pooled


class DeviceArrays:
    """Tensors on `device`."""

    place = "device"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, num_rows: int, num_columns: int, dtype: str) -> torch.Tensor:
        return torch.zeros(
            (num_rows, num_columns), dtype=getattr(torch, dtype), device=self._device
        )

    def take(self, data: torch.Tensor, columns: Ints) -> torch.Tensor:
        return data.index_select(1, upload(columns, self._device))

    def pooled(self, signal: Signal, values: torch.Tensor) -> torch.Tensor:
        return pooled(signal, values)


class Addition(NamedTuple):
    """What the kernel does to one accumulator, see `Additions`.

    It writes all of `now` where that is not `before`. `columns` [known]: where the `known` tokens
    were that stay; None: where they are.
    """

    before: torch.Tensor
    now: torch.Tensor
    known: int
    columns: Ints | None
    row: int


class DeviceAccumulator(Accumulator):
    """An accumulator whose single queries a kernel may add.

    `data` [rows, columns]: column j is that of the live token `ids[j]`.
    """

    data: torch.Tensor

    def advance(self, ids: Ints) -> Addition:
        """Account for a row over the live `ids` [n], which the kernel adds.

        The query is that of the newest token.
        """
        live_before, before, row = self.ids, self.data, self._next
        known, columns = len(ids) - (int(ids[-1]) + 1 - self.num_tokens), None
        if known != len(live_before):  # else no token has died, the new ones included
            known = int(np.searchsorted(ids, self.num_tokens))
            if known < len(live_before):
                columns = np.searchsorted(live_before, ids[:known])
        if columns is not None or not self._fits(len(ids)):
            self.data = before.new_empty(self.num_rows, self._room(len(ids)))
        self._count(ids, 1)
        self._next = (row + 1) % self.num_rows
        return Addition(before, self.data, known, columns, row)
