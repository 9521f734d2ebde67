"""Facts about the engine that the runtime does not have; the engine keeps them current."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.control.step_times import StepTimes


@dataclass(slots=True)
class EngineFacts:
    epoch: str
    vtoken_version: str
    vllm_version: str
    model: str
    device: str
    group_index: int = 0  # of the managed group
    running: int = 0
    waiting: int = 0
    withheld_blocks: int = 0
    block_bytes: int = 0  # of a block of the pool, on one rank; 0: not known
    reclamation_by: str = ""  # who changed the mode of reclamation last
    reclamation_since_ts: float | None = None
    step_times: StepTimes = field(default_factory=StepTimes)
