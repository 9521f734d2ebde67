"""The soak's engine in this process, and a record of when each token was evicted."""

from __future__ import annotations

import os
from typing import Any

from tests.soak.oracle import Stretch
from tests.soak.phases import START, Phase
from tests.support.core.request_step import parts_of
from tests.support.engines import engine_args


def make_engine(phase: Phase) -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
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


class Watch:
    """Records a runtime's evictions by request and token, and every (re)admission."""

    def __init__(self, scheduler: Any) -> None:
        self.stretches: dict[str, list[Stretch]] = {}
        self._scheduler = scheduler
        self._runtime = scheduler.vtoken
        self._commit = self._runtime.commit_step
        self._runtime.commit_step = self._commit_step

    def _commit_step(self, grown: Any) -> Any:
        for request_id in grown.new:
            known = self._scheduler.requests[request_id].num_tokens
            self._of(request_id).append(Stretch(known))
        plan = self._commit(grown)
        for request_id, part in parts_of(plan.requests).items():
            if len(part.evicted):
                self._of(request_id)[-1].evictions.append((part.num_tokens, part.evicted.tolist()))
        return plan

    def _of(self, request_id: str) -> list[Stretch]:
        return self.stretches.setdefault(external(request_id), [])


def external(request_id: str) -> str:
    """The request's own id: vLLM appends a random part."""
    return request_id.rsplit("-", 1)[0]
