"""The current step's context on CUDA: the runner sets it, the attention layers read it.

The CPU worker's is `vtoken.vllm.cpu.context`. `current()` is None in a step in which every request
is positional, in dummy runs and during graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.protocol.step import NO_IDS
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.probing import DeviceProbe
from vtoken.vllm.worker.executor import PhysicalStep


@dataclass(slots=True)
class CUDAStep:
    """One step.

    Row `physical.with_holes.index[i]` of the batch is the resident row `resident[i]` of `pages`.
    `probe`: None in a step without probes.
    """

    physical: PhysicalStep
    pages: PageTables
    resident: Ints = field(default_factory=lambda: NO_IDS)
    probe: DeviceProbe | None = None

    @property
    def has_holes(self) -> bool:
        """Whether attention cannot read some row of the batch through its block table."""
        return len(self.resident) > 0


def make_step(physical: PhysicalStep, pages: PageTables, *, use_triton: bool) -> CUDAStep:
    """Make the context of `physical`; updates the rows of `pages` for its holes and its probes."""
    step, with_holes = CUDAStep(physical, pages), physical.with_holes
    if not physical.probed:
        step.resident = pages.update(physical.mirrors, with_holes.rows)
        return step
    probed = np.array([request.mirror.row for request in physical.probed], dtype=np.int64)
    rows, places = np.unique(np.concatenate([with_holes.rows, probed]), return_inverse=True)
    resident = pages.update(physical.mirrors, rows)[places]
    step.resident = resident[: len(with_holes)]
    names = (request.request_id for request in physical.probed)
    of_name = dict(zip(names, resident[len(with_holes) :].tolist(), strict=True))
    step.probe = DeviceProbe(physical.probed, pages, of_name, use_triton=use_triton)
    return step


_current: CUDAStep | None = None


def set_current(step: CUDAStep | None) -> None:
    global _current
    _current = step


def current() -> CUDAStep | None:
    return _current
