"""What the runner tells the attention layers about the current step, within one CUDA worker.

The CPU worker's is `vtoken.vllm.cpu.context`. `current()` is None in a step that is positional
throughout, in dummy runs and while graphs are captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.vllm.cuda.pages import LiveRow, PageTables
from vtoken.vllm.cuda.signals.probing import DeviceProbe
from vtoken.vllm.worker.executor import PhysicalStep


@dataclass(slots=True)
class CUDAStep:
    """One step. `holey_rows[i]` of the batch is the resident row `resident[i]` of `pages`.

    `probe`: None in a step without one.
    """

    physical: PhysicalStep
    pages: PageTables
    holey_rows: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    probe: DeviceProbe | None = None


def make_step(physical: PhysicalStep, pages: PageTables, *, use_triton: bool) -> CUDAStep:
    """`physical` with the rows of `pages` brought up to date for its holes and its probes."""
    rows = {holey.row.request_id: LiveRow.of(holey) for holey in physical.holey}
    for probed in physical.probed:
        live = LiveRow(probed.request_id, probed.mirror, len(probed.ids))
        rows.setdefault(probed.request_id, live)
    resident = dict(zip(rows, pages.update([*rows.values()]), strict=True))
    step = CUDAStep(physical, pages)
    step.holey_rows = [holey.row.index for holey in physical.holey]
    step.resident = [resident[holey.row.request_id] for holey in physical.holey]
    if physical.probed:
        step.probe = DeviceProbe(physical.probed, pages, resident, use_triton=use_triton)
    return step


_current: CUDAStep | None = None


def set_current(step: CUDAStep | None) -> None:
    global _current
    _current = step


def current() -> CUDAStep | None:
    return _current
