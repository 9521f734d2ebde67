"""Accumulators on a device: they aggregate a request's attention without reading it back.

Rows are tensors on the device, live ids are on the host. Chunks, and kinds without a kernel, are
added in torch. Single queries of the other kinds are added by one launch for all requests
(`Additions`), for which the host keeps the same account.
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.policies.signals import Accumulator, Signal
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.worker.probe import pooled


class DeviceAccumulator(Accumulator):
    """An accumulator whose single queries a kernel may add.

    `data` [rows, columns]: column j is that of the live token `ids[j]`. `num_columns` and `address`
    are its own, read once, since torch takes longer than the rest of a step's account.
    """

    _ids: Ints
    _num_ids: int  # of `ids`, also while the newest are not in `_ids`

    def __init__(self, signal: Signal, device: torch.device) -> None:
        self._device = device
        super().__init__(signal)

    def _zeros(self, num_columns: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self._dtype)
        return torch.zeros((self.num_rows, num_columns), dtype=dtype, device=self._device)

    def _take(self, data: torch.Tensor, columns: Ints) -> torch.Tensor:
        return data.index_select(1, upload(columns, self._device))

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

    def lost_tokens(self, num_live: int, num_tokens: int) -> bool:
        """Whether a token has died since the last row, of a request that has `num_live` live ones
        among `num_tokens`.
        """
        return self._num_ids + num_tokens - self.num_tokens != num_live

    def advance(
        self, num_live: int, num_tokens: int, ids: Ints | None
    ) -> tuple[torch.Tensor, int, Ints | None, int]:
        """Account for a row over `num_live` tokens, which the kernel adds, see `Additions`.

        The query is that of the newest of `num_tokens` tokens. `ids` [num_live]: the live ones;
        None if none has died since the last row. Returns the `data` of before, and if that is not
        `data` now, the kernel writes all of it; how many of its tokens stay, and where those were
        [known], None: where they are; and the row that is written.
        """
        before, row, known, columns = self._data, self._next, self._num_ids, None
        if ids is not None:
            known = int(np.searchsorted(ids, self.num_tokens))
            if known < self._num_ids:
                columns = np.searchsorted(self.ids, ids[:known])
            self.ids = ids
        if columns is not None or not self._fits(num_live, self.num_columns):
            self.data = before.new_empty(self.num_rows, self._room(num_live))
        self._count(num_tokens, 1)
        self._num_ids = num_live
        self._next = (row + 1) % self.num_rows
        return before, known, columns, row
