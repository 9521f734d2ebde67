"""Host arrays to the device without making the host wait."""

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
