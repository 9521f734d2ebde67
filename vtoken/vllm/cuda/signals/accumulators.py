"""Accumulators on a device: they aggregate a request's attention without reading it back.

Rows are tensors on the device, live ids are on the host.
"""

from __future__ import annotations

import torch

from vtoken.base.arrays import Ints
from vtoken.policies.signals import Signal
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
