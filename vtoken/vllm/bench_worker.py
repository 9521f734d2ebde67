"""One engine in one process, measured step by step on demand; the other end of `vtoken.bench`.

Reads JSON lines on stdin: first the engine's description, then one workload a line; answers each
with a JSON line on the descriptor named in the first argument (stdout belongs to vLLM). Instead of
a workload, `hold` and `slice` keep requests running, see `vtoken.vllm.bench_slices`. A workload:

    requests          [{"prompt": [ids], "num_new": n, "arguments": {...} for vllm_xargs}]
    concurrency       keep so many unfinished (default: all at once)
    config            a patch of the configuration, applied before
    gaps              note when each token arrives (costs time in every step, in all variants)
    sample_every      sample the memory every so many steps, outside the clock
    stop_on_overflow  stop once a request was preempted, or waits while all others only decode
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from vtoken.bench.counters import Instructions
from vtoken.bench.samples import sample, summary
from vtoken.vllm.bench_slices import Held


def _engine(spec: dict[str, Any]) -> Any:
    """The engine, with and without vToken on the same model runner: V1, unless the environment
    chooses V2, which CUDA alone serves.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    extra: dict[str, Any] = {}
    if spec["vtoken"] is not None:
        from vtoken.vllm import engine_args

        extra = engine_args(spec["vtoken"], **spec["settings"])
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**spec["engine"], **extra))


V1_HOOKS = ("_update_states", "_prepare_inputs", "execute_model", "sample_tokens")
V2_HOOKS = (
    "finish_requests",
    "add_requests",
    "update_requests",
    "gather_batch_req_state",
    "prepare_attn",
    "execute_model",
    "sample_tokens",
)


class HookTimer:
    """Adds up what vToken's methods take, less what the vLLM methods that they extend take.

    `seconds` by side, scheduler and worker; publishing counts. What runs inside the forward, and in
    the block manager, is not seen. On CUDA it is the host's time.
    """

    def __init__(self, scheduler: Any, runner: Any) -> None:
        self.seconds = {"scheduler": 0.0, "worker": 0.0}
        if getattr(scheduler, "vtoken", None) is None:
            return
        from vtoken.vllm.engine.scheduler import VTokenSchedulerMixin

        for name in ("schedule", "update_from_output"):
            self._wrap("scheduler", type(scheduler), VTokenSchedulerMixin, name)
        mixin, names = _runner_hooks(type(runner))
        for name in names:
            self._wrap("worker", type(runner), mixin, name)

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _wrap(self, side: str, owner: type, mixin: type, name: str) -> None:
        stock = _extended(owner, mixin, name)
        for cls, sign in ((mixin, 1.0), (stock, -1.0)):
            setattr(cls, name, self._timed(vars(cls)[name], side, sign))

    def _timed(self, inner: Callable[..., Any], side: str, sign: float) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[side] += sign * (time.perf_counter() - started)

        return timed


def _extended(owner: type, mixin: type, name: str) -> type:
    """The class of vLLM whose method `name` the `mixin` extends in `owner`."""
    bases = owner.__mro__[owner.__mro__.index(mixin) + 1 :]
    own = "vtoken."
    return next(b for b in bases if name in vars(b) and not b.__module__.startswith(own))


def _runner_hooks(runner: type) -> tuple[type, tuple[str, ...]]:
    """vToken's part of a model runner, V1 on CPU and on CUDA or V2, and its methods in a step."""
    from vtoken.vllm.worker.runner_v1 import VTokenRunnerMixin

    if issubclass(runner, VTokenRunnerMixin):
        return VTokenRunnerMixin, V1_HOOKS
    from vtoken.vllm.cuda.runner_v2 import VTokenV2Mixin

    return VTokenV2Mixin, V2_HOOKS


class Run:
    """One workload on one engine."""

    def __init__(self, engine: Any, workload: dict[str, Any], tag: int) -> None:
        self.engine, self.workload, self.tag = engine, workload, tag
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.runtime = getattr(self.scheduler, "vtoken", None)
        self.queue = list(enumerate(workload["requests"]))
        self.steps_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self.tokens: dict[str, list[int]] = {}
        self.last_token: dict[str, float] = {}
        self.most_running = 0
        self.stalled = 0  # requests that waited after the last step while all others decoded
        self.overflowed = False

    def go(self) -> dict[str, Any]:
        concurrency = self.workload.get("concurrency") or len(self.queue)
        every = self.workload.get("sample_every", 0)
        preemptions = self._preemptions()
        for _ in range(min(concurrency, len(self.queue))):
            self._add()
        cpu = time.process_time()
        last, seconds = time.perf_counter(), 0.0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            seconds += now - last
            self.steps_ms.append((now - last) * 1e3)
            finished = self._take(outputs, now)
            if self._preemptions() > preemptions or self._stuck(finished):
                self.overflowed = True
                if self.workload.get("stop_on_overflow"):
                    break
            if every and len(self.steps_ms) % every == 0 and self.runtime is not None:
                found = sample(self.runtime)
                if found is not None:
                    self.samples.append(found)
            for _ in range(min(finished, len(self.queue))):
                self._add()
            last = time.perf_counter()
        answer = {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(map(len, self.tokens.values())),
            "steps_ms": self.steps_ms,
            "tokens_hash": self._hash(),
            "most_running": self.most_running,
            "overflowed": self.overflowed,
            "preemptions": self._preemptions() - preemptions,
        }
        if self.gaps_ms:
            gaps = sorted(self.gaps_ms)
            answer["gap_p50_ms"] = gaps[len(gaps) // 2]
            answer["gap_p95_ms"] = gaps[int(len(gaps) * 0.95)]
        if self.samples:
            answer["memory"] = summary(self.samples)
        self._stop()
        return answer

    def _add(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number, request = self.queue.pop(0)
        kind = RequestOutputKind.DELTA if self.workload.get("gaps") else None
        params = SamplingParams(
            temperature=0,
            max_tokens=request["num_new"],
            ignore_eos=True,
            detokenize=False,
            output_kind=kind or RequestOutputKind.FINAL_ONLY,
            extra_args=request.get("arguments"),
        )
        name = f"{self.tag}-{number}"
        self.engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)

    def _take(self, outputs: Any, now: float) -> int:
        """Note the tokens of one step; how many requests are done."""
        finished = 0
        gaps = self.workload.get("gaps")
        for output in outputs:
            ids = output.outputs[0].token_ids
            self.tokens.setdefault(output.request_id, []).extend(ids)
            if gaps and len(ids):
                before = self.last_token.get(output.request_id)
                if before is not None:
                    self.gaps_ms.append((now - before) * 1e3)
                self.last_token[output.request_id] = now
            finished += output.finished
        return finished

    def _stuck(self, finished: int) -> bool:
        """Whether requests wait and a step has admitted none while all others only decode."""
        counts: tuple[int, int] = self.scheduler.get_request_counts()
        running, waiting = counts
        self.most_running = max(self.most_running, running)
        before, self.stalled = self.stalled, 0
        decode = all(r.num_computed_tokens >= r.num_prompt_tokens for r in self.scheduler.running)
        if waiting and decode and not finished:
            self.stalled = waiting
        return waiting > 0 and waiting == before == self.stalled

    def _preemptions(self) -> int:
        return 0 if self.runtime is None else self.runtime.counters.preemptions

    def _hash(self) -> str:
        """Names all tokens of all requests, in the order of the workload."""
        numbers = sorted(self.tokens, key=lambda name: int(name.split("-")[1]))
        text = json.dumps([list(map(int, self.tokens[name])) for name in numbers])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _stop(self) -> None:
        """Abort what an early stop left."""
        left = [r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)]
        if left:
            self.engine.abort_request(left, internal=True)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.engine.reset_prefix_cache()


CUMULATIVE = (
    "recycled_slots",
    "evicted_tokens",
    "relocations",
    "moved_tokens",
    "shared_skipped_blocks",
)


def _facts(scheduler: Any) -> dict[str, Any]:
    runtime = getattr(scheduler, "vtoken", None)
    if runtime is None:
        return {"endpoint": None}
    counters = runtime.counters
    return {
        "endpoint": scheduler.vtoken_controller.telemetry_endpoint,
        "num_blocks": runtime.geometry.num_blocks,
        "block_size": runtime.geometry.block_size,
        "fields": list(msgspec.structs.asdict(runtime.config.values())),
        "recycled_slots": counters.recycled_slots,
        "evicted_tokens": counters.evicted_tokens,
        "relocations": counters.relocations,
        "moved_tokens": counters.moved_tokens,
        "shared_skipped_blocks": counters.shared_skipped_blocks,
        "violations": counters.violations,
    }


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    instructions = Instructions()  # before any thread: it counts those that are made after it
    engine = _engine(json.loads(sys.stdin.readline()))
    scheduler = engine.engine_core.engine_core.scheduler
    answer(_facts(scheduler) | {"instructions_missing": instructions.missing})
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    hooks = HookTimer(scheduler, worker.model_runner)
    held: Held | None = None
    for tag, line in enumerate(sys.stdin):
        question = json.loads(line)
        if held is not None and "slice" not in question:
            held.close()
            held = None
        before = _facts(scheduler)
        hooks.reset()
        if "slice" in question:
            assert held is not None, "nothing is held"
            result = held.slice(question["slice"])
        elif "hold" in question:
            held, result = Held(engine, hooks, instructions, question["hold"]), {}
        else:
            if question.get("config"):
                scheduler.vtoken_controller.patch_config(question["config"], actor="bench")
            result = Run(engine, question, tag).go()
        after = _facts(scheduler)
        for name in CUMULATIVE:
            if name in after:
                after[name] -= before[name]
        answer(result | after | {"hook_seconds": hooks.seconds})


if __name__ == "__main__":
    main()
