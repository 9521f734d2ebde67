"""Accumulators on a device: they aggregate a request's attention without reading it back.

Rows are tensors on the device, live ids are on the host. Chunks, and kinds without a kernel, are
added in torch. Single queries of the other kinds are added by one launch for all requests
(`Additions`), for which the host keeps the same account.
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.policies.signals import Accumulator, Change, Signal
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.worker.probe import pooled


class DeviceAccumulator(Accumulator):
    """An accumulator whose single queries a kernel may add.

    `data` [rows, columns]: column j is that of the live token `ids[j]`. `num_columns` and `address`
    are its own, read once, since torch takes longer than the rest of a step's account.
    """

    _ids: Ints
    _num_ids: int  # of `ids`, also while the newest are not in `_ids`
    _version = -1  # of the mirror at the last `advance`

    def __init__(self, signal: Signal, device: torch.device) -> None:
        self._device = device
        super().__init__(signal)

    def _zeros(self, num_columns: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self._dtype)
        return torch.zeros((self.num_rows, num_columns), dtype=dtype, device=self._device)

    def _take(self, data: torch.Tensor, columns: Ints) -> torch.Tensor:
        return data.index_select(1, upload(columns, self._device))

    def _put(self, data: torch.Tensor, columns: Ints, values: torch.Tensor) -> None:
        data.index_copy_(1, upload(columns, self._device), values)

    def _pooled(self, values: torch.Tensor) -> torch.Tensor:
        return pooled(self.signal, values)

    @property
    def data(self) -> torch.Tensor:
        return self._data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        self._data, self.num_columns, self.address = data, data.shape[1], data.data_ptr()

    @property
    def ids(self) -> Ints:
        grown = self._num_ids - len(self._ids)
        if grown:  # the newest tokens, which all live
            newest = np.arange(self.num_tokens - grown, self.num_tokens)
            self._ids = np.concatenate((self._ids, newest))
        return self._ids

    @ids.setter
    def ids(self, ids: Ints) -> None:
        self._ids, self._num_ids = ids, len(ids)

    @property
    def of_dead(self) -> torch.Tensor:
        """By token id: the sums [1, t] of tokens when they died; see `Accumulator`."""
        return self._of_dead

    def may_differ(self, version: int) -> bool:
        """Whether a token may have died or come back since the last row, at this `version` of the
        request's mirror.
        """
        return version != self._version

    def advance(
        self, num_live: int, num_tokens: int, version: int, ids: Ints | None
    ) -> tuple[torch.Tensor, int, Change | None, int]:
        """Account for a row over `num_live` tokens, which the kernel adds, see `Additions`.

        The query is that of the newest of `num_tokens` tokens. `ids` [num_live]: the live ones;
        None if none `may_differ`. Returns the `data` of before, and if that is not `data` now, the
        kernel writes all of it; how many of its tokens stay or came back; the change of their
        columns, None: they are where they were; and the row that is written.
        """
        before, row, known, change = self._data, self._next, self._num_ids, None
        if ids is not None:
            change = self._change_to(ids)
            self.ids = ids
        if change is not None:
            known = len(change.columns)
            if self._sums:
                self._reserve_sums()
        if change is not None or not self._fits(num_live, self.num_columns):
            self.data = before.new_empty(self.num_rows, self._room(num_live))
        self._count(num_tokens, 1)
        self._num_ids, self._version = num_live, version
        self._next = (row + 1) % self.num_rows
        return before, known, change, row
