"""One engine in one process, timed step by step on demand; the other end of `vtoken.bench`.

Reads JSON lines on stdin: first the engine's description, then one workload a line; answers each
with a JSON line on the descriptor named in the first argument (stdout belongs to vLLM).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _engine(spec: dict[str, Any]) -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    extra: dict[str, Any] = {}
    if spec["vtoken"] is not None:
        from vtoken.vllm import engine_args

        extra = engine_args(spec["vtoken"])
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**spec["engine"], **extra))


class HookTimer:
    """Adds up the time that vToken's own code takes in the scheduler, publishing included."""

    def __init__(self, engine: Any) -> None:
        self.seconds = 0.0
        scheduler = engine.engine_core.engine_core.scheduler
        runtime = getattr(scheduler, "vtoken", None)
        if runtime is not None:
            for name in ("begin_step", "commit_step", "finish_step"):
                self._wrap(runtime, name)
            self._wrap(scheduler, "_note_step")

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, timed)


def _run(engine: Any, workload: dict[str, Any], tag: int) -> dict[str, Any]:
    """Closed batch: all prompts at once, greedy, `num_new` tokens each; times every engine step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=workload["num_new"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for i, prompt in enumerate(workload["prompts"]):
        engine.add_request(f"{tag}-{i}", {"prompt_token_ids": prompt}, params)
    steps_ms = []
    started, cpu = time.perf_counter(), time.process_time()
    last = started
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens += sum(len(o.token_ids) for o in output.outputs if output.finished)
        now = time.perf_counter()
        steps_ms.append((now - last) * 1e3)
        last = now
    return {
        "seconds": last - started,
        "cpu_seconds": time.process_time() - cpu,
        "tokens": num_tokens,
        "steps_ms": steps_ms,
    }


def _facts(engine: Any) -> dict[str, Any]:
    scheduler = engine.engine_core.engine_core.scheduler
    runtime = getattr(scheduler, "vtoken", None)
    if runtime is None:
        return {"endpoint": None}
    counters = runtime.counters
    return {
        "endpoint": scheduler.vtoken_controller.telemetry_endpoint,
        "recycled_slots": counters.recycled_slots,
        "evicted_tokens": counters.evicted_tokens,
        "relocations": counters.relocations,
        "violations": counters.violations,
    }


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    engine = _engine(json.loads(sys.stdin.readline()))
    answer(_facts(engine))
    hooks = HookTimer(engine)
    for tag, line in enumerate(sys.stdin):
        hooks.seconds = 0.0
        result = _run(engine, json.loads(line), tag)
        answer(result | _facts(engine) | {"hook_seconds": hooks.seconds})


if __name__ == "__main__":
    main()
