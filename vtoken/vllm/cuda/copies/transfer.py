"""Between the host and a device without making the host wait: arrays up, tensors down."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`, copied on the current stream from pinned memory.

    The pinned copy is made here, so `array` may change afterwards; torch keeps the pinned memory
    until the stream has read it. On the CPU the result is a copy too.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in pinned memory of the host, copied on the current stream.

    Its contents are there when the stream has come so far, which only an event recorded behind this
    call can tell. `tensor` may be given up at once, whichever stream made it.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return host
