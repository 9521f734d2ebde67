"""One engine in one process, measured on demand; the worker process of `vtoken_bench`.

Reads JSON lines on stdin: first the engine's description, then one workload a line. Writes one JSON
line for each on the file descriptor in the first argument, because vLLM uses stdout. A workload is
a load (`vtoken_bench.vllm.load`), or `hold` and then `slice` (`vtoken_bench.vllm.slices`). A load
with `profile` is traced by torch's profiler in as many `steps` `after` so many, under its `name`.
One with `turn_s` answers {"paused": true} before its first step and after so many seconds, and goes
on after the next line, so that several engines can take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from vtoken_bench.counters import Instructions
from vtoken_bench.vllm.forwards import Forwards
from vtoken_bench.vllm.load import Load
from vtoken_bench.vllm.slices import HeldRequests


def _engine(spec: dict[str, Any]) -> Any:
    """Make the engine. With and without vToken it uses the same model runner, vLLM's choice: V1 on
    CPU, where it finds no Triton, and V2 on CUDA.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    extra: dict[str, Any] = {}
    if spec["vtoken"] is not None:
        from vtoken.vllm import engine_args

        config = {"evict_when": "always"} | spec["vtoken"]
        extra = engine_args(config, **spec["settings"])
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
    """Sums the time of vToken's methods, less the time of the vLLM methods that they extend.

    `seconds`: by scheduler and worker; without `runner`, which is then in another process, the
    scheduler's alone. Includes publishing; excludes code inside the forward and in the block
    manager. On CUDA this is the host's time.
    """

    def __init__(self, scheduler: Any, runner: Any | None) -> None:
        self.seconds = dict.fromkeys(("scheduler", *(() if runner is None else ("worker",))), 0.0)
        if getattr(scheduler, "vtoken", None) is None:
            return
        from vtoken.vllm.engine.scheduler import VTokenSchedulerMixin

        for name in ("schedule", "update_from_output"):
            self._wrap("scheduler", type(scheduler), VTokenSchedulerMixin, name)
        if runner is None:
            return
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
    """The vLLM class whose method `name` the `mixin` extends in `owner`."""
    bases = owner.__mro__[owner.__mro__.index(mixin) + 1 :]
    return next(b for b in bases if name in vars(b) and not b.__module__.startswith("vtoken."))


def _runner_hooks(runner: type) -> tuple[type, tuple[str, ...]]:
    """vToken's class in a model runner, V1 or V2, and the names of its methods in a step."""
    from vtoken.vllm.cpu.runner import VTokenCPURunner

    if issubclass(runner, VTokenCPURunner):
        return VTokenCPURunner, V1_HOOKS
    from vtoken.vllm.cuda.runner import VTokenV2Mixin

    return VTokenV2Mixin, V2_HOOKS


COUNTERS = {  # fact -> counter
    "recycled_slots": "reclamation.recycled_slots",
    "evicted_tokens": "tokens.evicted",
    "given_tokens": "pressure.given_tokens",
    "preemptions_above_floor": "pressure.preemptions_above_floor",
    "relocations": "reclamation.relocations",
    "moved_tokens": "reclamation.moved_tokens",
    "reclaimed_blocks": "reclamation.reclaimed_blocks",
    "shared_skipped_blocks": "reclamation.shared_skipped_blocks",
    "verified_relocations": "invariants.verified_relocations",
    "plan_us": "reclamation.plan_us",
    "copy_us": "reclamation.copy_us",
    "packed_tokens": "reclamation.packed_tokens",
    "pack_us": "reclamation.pack_us",
    "parked_tokens": "parking.copied_tokens",
    "restored_tokens": "parking.restored_tokens",
    "thrashed_tokens": "parking.thrashed_tokens",
    "dropped_tokens": "parking.dropped_tokens",
    "park_us": "parking.park_us",
    "restore_us": "parking.restore_us",
    "swapped_requests": "parking.swapped_requests",
    "swapped_tokens": "parking.swapped_tokens",
}
CUMULATIVE = (*COUNTERS, "kept_share_sum")  # of the facts


def _facts(scheduler: Any) -> dict[str, Any]:
    runtime = getattr(scheduler, "vtoken", None)
    if runtime is None:
        return {"endpoint": None}
    return {
        "endpoint": scheduler.vtoken_controller.telemetry_endpoint,
        "num_blocks": runtime.geometry.num_blocks,
        "block_size": runtime.geometry.block_size,
        "violations": runtime.counters.invariants.violations,
        **{fact: attrgetter(name)(runtime.counters) for fact, name in COUNTERS.items()},
        "kept_share_sum": runtime.finished.kept_sum,
        "park_peak_bytes": runtime.parking.slots.peak * runtime.geometry.bytes_per_token,
    }


class Turns:
    """When a load has to let other engines run. `seconds` None: never.

    The clock that vToken's waits go by, `time.monotonic`, stands still while others run.
    """

    def __init__(self, seconds: float | None, pause: Callable[[], None]) -> None:
        self._seconds, self._pause, self._ends = seconds, pause, 0.0
        self._runs, self._away_s = time.monotonic, 0.0
        if seconds is not None:
            time.monotonic = lambda: self._runs() - self._away_s

    def between_steps(self) -> None:
        """Waits for the next turn if this one is over."""
        if self._seconds is not None and time.perf_counter() >= self._ends:
            stopped = self._runs()
            self._pause()
            self._away_s += self._runs() - stopped
            self._ends = time.perf_counter() + self._seconds


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    def pause() -> None:
        answer({"paused": True})
        sys.stdin.readline()

    instructions = Instructions()  # before any thread, because it counts only later threads
    engine = _engine(json.loads(sys.stdin.readline()))
    scheduler = engine.engine_core.engine_core.scheduler
    answer(_facts(scheduler) | {"instructions_missing": instructions.missing})
    driver = getattr(engine.engine_core.engine_core.model_executor, "driver_worker", None)
    runner = None if driver is None else driver.worker.model_runner
    hooks = HookTimer(scheduler, runner)
    forwards = Forwards(scheduler, runner)
    held: HeldRequests | None = None
    for tag, line in enumerate(sys.stdin):
        workload = json.loads(line)
        if held is not None and "slice" not in workload:
            held.close()
            held = None
        before = _facts(scheduler)
        hooks.reset()
        forwards.reset()
        if "slice" in workload:
            assert held is not None, "`slice` without `hold`"
            result = held.slice(workload["slice"])
        elif "hold" in workload:
            held, result = HeldRequests(engine, hooks, instructions, workload["hold"]), {}
        else:
            if workload.get("config"):
                scheduler.vtoken_controller.patch_config(workload["config"], actor="bench")
            profile, turns = workload.get("profile"), Turns(workload.get("turn_s"), pause)
            if profile:
                engine.start_profile(
                    profile["name"],
                    delay_iterations=profile["after"],
                    max_iterations=profile["steps"],
                )
            result = Load(engine, workload, tag).run(turns.between_steps) | forwards.facts()
            if profile:
                engine.stop_profile()
        after = _facts(scheduler)
        for name in CUMULATIVE:
            if name in after:
                after[name] -= before[name]
        answer(result | after | {"hook_seconds": hooks.seconds})


if __name__ == "__main__":
    main()
