"""Inject faults of the worker's half into a real vLLM engine in this process.

Violations are collected instead of raised, so that one engine serves many faults. If no check
notices a fault, the masked reference of the soak checks the sampled tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults.catalogue import REPORTERS, Fault, Hit, Noticed, noticed
from tests.soak.oracle import Oracle
from tests.support import reference
from tests.support.live_sets import LiveSets
from vtoken.base.errors import InvariantViolation
from vtoken.core.config.values import merge_patch

ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 96,
    "max_model_len": 512,
    "block_size": 16,
}
CONFIG: dict[str, Any] = {
    "policy": {"name": "random", "params": {"recent": 4, "sinks": 2}},
    "budget_tokens": 48,
    "budget_ratio": 0.0,
    "interval_tokens": 12,
    "evict_when": "always",
    "theta_f": 0.0,
    "low_watermark_blocks": 96,
    "headroom_blocks": 8,
    "recycle": False,
    "verify_ratio": 1.0,
}
NUM_NEW = 48
SWING_STEPS = 6  # between two changes of the budget, of faults with `budgets`
PREFIX = reference.random_prompt(70, 7)
PROMPTS = [PREFIX + reference.random_prompt(20 + 9 * i, i)[1:] for i in range(4)]
TOLERANCE = 1e-3


class EngineUnderFaults:
    """A running engine; `heal` undoes a fault and its effects."""

    def __init__(self, llm: Any, model: Path) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runtime = self.scheduler.vtoken
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.watch = LiveSets(self.scheduler)
        self.oracle = Oracle(model)
        self.stack = ExitStack()
        self.broken = False
        self._runs = 0

    def run(self, fault: Fault) -> Noticed | None:
        """Inject `fault` under traffic; None if neither a check nor the oracle notices it."""
        found: list[Noticed] = []
        hit = Hit(lambda: self.runtime.step)

        def violated(violation: Any) -> None:
            if violation.__traceback__ is not None:  # raised by a check below
                found.append(noticed(violation, hit))
                return
            frame = sys._getframe(1)
            while frame.f_code.co_name in REPORTERS and frame.f_back is not None:
                frame = frame.f_back
            place = frame.f_code.co_qualname
            steps = self.runtime.step - (hit.at or self.runtime.step)
            found.append(Noticed(f"{violation.invariant}, `{place}`", violation.detail, steps))

        self._configure(CONFIG | fault.options.get("config", {}))
        with self.stack:
            self.stack.enter_context(patch.object(self.runtime.current, "violated", violated))
            self._runs += 1
            outputs = self._traffic(fault, hit, found)
        assert hit.times, f"{fault.name}: never injected"
        if not found and not self.broken:
            found = self._compare(outputs)
        self.heal()
        return found[0] if found else None

    def _configure(self, values: dict[str, Any]) -> None:
        geometry = self.runtime.geometry
        self.runtime.active.config = merge_patch(
            self.runtime.config,
            values,
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
        )

    def _traffic(self, fault: Fault, hit: Hit, found: list[Noticed]) -> dict[str, list[int]]:
        """Two waves over one prefix: the second one hits what the first one left in the cache.

        A fault with a `crowd` has one wave, of so many requests with each prompt.
        """
        outputs: dict[str, list[int]] = {}
        crowd = fault.options.get("crowd", 1)
        for wave in range(2 if crowd == 1 else 1):
            for number, prompt in enumerate(PROMPTS * crowd):
                self._submit(f"f{self._runs}w{wave}n{number}", prompt)
            for step in range(10_000):
                if wave == 0 and step == 6:
                    fault.inject(self, hit)
                if (budgets := fault.options.get("budgets")) and step % SWING_STEPS == 0:
                    self._configure({"budget_tokens": budgets[step // SWING_STEPS % len(budgets)]})
                if found or not self.llm.llm_engine.has_unfinished_requests():
                    break
                try:
                    for output in self.llm.llm_engine.step():
                        outputs[output.request_id] = list(output.outputs[0].token_ids)
                except Exception as error:
                    found.append(noticed(error, hit))
                    self.broken = True
        return outputs

    def _submit(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=NUM_NEW,
            ignore_eos=True,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _compare(self, outputs: dict[str, list[int]]) -> list[Noticed]:
        wrong = compared = 0
        for name, output in outputs.items():
            prompt = PROMPTS[int(name.rpartition("n")[2]) % len(PROMPTS)]
            verdict = self.oracle.compare(prompt, output, self.watch.stretches[name])
            compared += len(verdict.gaps)
            wrong += verdict.num_worse_than(TOLERANCE)
        detail = f"{wrong} of {compared} tokens differ from the reference"
        return [Noticed("wrong tokens", detail, 0)] if wrong else []

    def heal(self) -> None:
        """Abort all requests and reset the prefix cache."""
        self.stack.close()
        if self.broken:
            return
        running = [r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)]
        self.llm.llm_engine.abort_request(running, internal=True)
        self.llm.llm_engine.step()  # so that the worker drops them too
        assert self.scheduler.reset_prefix_cache()
        try:
            self.runtime.check()
        except InvariantViolation:  # the fault cannot be undone
            self.broken = True

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Patch an attribute until `heal`."""
        self.stack.enter_context(patch.object(owner, name, value))

    def each_plan(self, change: Callable[[Any], bool], hit: Hit) -> None:
        """Pass every step plan to `change` before the worker; it returns whether it did damage."""
        commit = self.runtime.commit_step

        def commit_step(grown: Any) -> Any:
            plan = commit(grown)
            if change(plan):
                hit()
            return plan

        self.replace(self.runtime, "commit_step", commit_step)
