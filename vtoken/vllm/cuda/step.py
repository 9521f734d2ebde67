"""What the runner tells the attention layers about the current step, within one CUDA worker.

The CPU worker's is `vtoken.vllm.cpu.context`. `current()` is None in a step that is positional
throughout, in dummy runs and while graphs are captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.arrays import Ints
from vtoken.protocol.step import NO_IDS
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.probing import DeviceProbe
from vtoken.vllm.worker.executor import PhysicalStep


@dataclass(slots=True)
class CUDAStep:
    """One step. Row `physical.holey.index[i]` of the batch is the resident row `resident[i]` of
    `pages`. `probe`: None in a step without one.
    """

    physical: PhysicalStep
    pages: PageTables
    resident: Ints = field(default_factory=lambda: NO_IDS)
    probe: DeviceProbe | None = None

    @property
    def has_holes(self) -> bool:
        """Whether some row of the batch cannot be read through its block table."""
        return len(self.resident) > 0


def make_step(physical: PhysicalStep, pages: PageTables, *, use_triton: bool) -> CUDAStep:
    """`physical` with the rows of `pages` brought up to date for its holes and its probes."""
    step, holey = CUDAStep(physical, pages), physical.holey
    if not physical.probed:
        step.resident = pages.update(physical.mirrors, holey.rows)
        return step
    probed = np.array([request.mirror.row for request in physical.probed], dtype=np.int64)
    rows, places = np.unique(np.concatenate([holey.rows, probed]), return_inverse=True)
    resident = pages.update(physical.mirrors, rows)[places]
    step.resident = resident[: len(holey)]
    names = (request.request_id for request in physical.probed)
    of_name = dict(zip(names, resident[len(holey) :].tolist(), strict=True))
    step.probe = DeviceProbe(physical.probed, pages, of_name, use_triton=use_triton)
    return step


_current: CUDAStep | None = None


def set_current(step: CUDAStep | None) -> None:
    global _current
    _current = step


def current() -> CUDAStep | None:
    return _current
