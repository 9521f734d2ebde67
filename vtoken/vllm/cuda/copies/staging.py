"""One upload a step: everything that a step needs on the device, in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtoken.vllm.cuda.copies.transfer import upload

ALIGNMENT = 4  # numbers, 16 bytes: Triton compiles a kernel anew for pointers that are not aligned


class Section:
    """An array in the upload. `on_device`: int32, in the array's shape; valid after `send`."""

    __slots__ = ("on_device",)

    on_device: torch.Tensor


class Staging:
    """Collects arrays, and sends them to `device` as int32 in one copy on the current stream.

    torch keeps the pinned memory until the stream has read it, and the device's memory until work
    that was launched before is done. So a step may be prepared while earlier ones are in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[Section, npt.NDArray[Any]]] = []

    def put(self, array: npt.NDArray[Any]) -> Section:
        """Send `array`, whose numbers fit int32, with the next `send`."""
        section = Section()
        self._parts.append((section, array))
        return section

    def send(self) -> None:
        """Send what was put since the last call; nothing if that is nothing."""
        if not self._parts:
            return
        starts, size = [], 0
        for _, array in self._parts:
            starts.append(size)
            size += -(-array.size // ALIGNMENT) * ALIGNMENT
        host = np.empty(size, dtype=np.int32)
        for start, (_, array) in zip(starts, self._parts, strict=True):
            host[start : start + array.size] = array.reshape(-1)
        sent = upload(host, self._device)
        for start, (section, array) in zip(starts, self._parts, strict=True):
            part = sent[start : start + array.size]
            section.on_device = part if array.ndim == 1 else part.view(array.shape)
        self._parts.clear()
