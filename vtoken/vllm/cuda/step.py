"""The current step's context on CUDA: the runner sets it, the attention layers read it.

The CPU worker's is `vtoken.vllm.cpu.context`. `current()` is None in dummy runs and during graph
capture. Code in a captured graph sees the context of its capture, which is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.vllm.cuda.signals.probing import DeviceProbe


@dataclass(slots=True)
class CUDAStep:
    """One step. `max_lens` [R]: upper bounds of what attention reads, by row of the batch.

    `probe`: None in a step without probes.
    """

    max_lens: npt.NDArray[np.int32]
    probe: DeviceProbe | None = None


_current: CUDAStep | None = None


def set_current(step: CUDAStep | None) -> None:
    global _current
    _current = step


def current() -> CUDAStep | None:
    return _current
