"""The soak's engine in this process."""

from __future__ import annotations

import os
from typing import Any

from tests.soak.phases import START, Phase
from tests.support.engines import engine_args


def make_engine(phase: Phase) -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    extra = engine_args(START | {"verify_ratio": 1.0}, strict=True, check_every_step=True)
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(model=phase.model, **phase.engine.arguments, **extra)
    )


def sampling_params(sampling: dict[str, Any]) -> Any:
    """vLLM's SamplingParams from the drawn `sampling`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling = {**sampling, "output_kind": RequestOutputKind.CUMULATIVE}
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
    return SamplingParams(**sampling)


def abort_during_step(engine: Any, name: str) -> None:
    """Abort request `name` between the next step's schedule and its output."""
    core = engine.engine_core.engine_core
    core.aborts_queue.put(engine.output_processor.abort_requests([name], False))


def is_busy(engine: Any) -> bool:
    """Whether a step is due. Only the core still lists a request aborted during its step."""
    core = engine.engine_core.engine_core
    return bool(engine.has_unfinished_requests() or core.scheduler.has_unfinished_requests())
