"""Uploads and downloads that do not make the host wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`, copied on the current stream from pinned memory.

    The pinned copy is made here, so `array` may change afterwards. torch keeps the pinned memory
    until the stream has read it. On the CPU the result is a copy too.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in pinned memory of the host, copied on the current stream.

    The contents are valid once an event recorded after this call is complete. If another stream
    made `tensor`, the caller keeps its memory until then (`Streams.keep`).
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
