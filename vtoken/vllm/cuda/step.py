"""What the runner tells the attention layers about the current step, within one CUDA worker.

The CPU worker's is `vtoken.vllm.context`. `current()` is None in a step that is positional
throughout, in dummy runs and while graphs are captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.executor import PhysicalStep


@dataclass(slots=True)
class CUDAStep:
    """One step. `holey_rows[i]` of the batch is the resident row `resident[i]` of `pages`."""

    physical: PhysicalStep
    pages: PageTables
    holey_rows: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)


_current: CUDAStep | None = None


def set_current(step: CUDAStep | None) -> None:
    global _current
    _current = step


def current() -> CUDAStep | None:
    return _current
