"""Requests that keep running on one engine, measured in short slices of decode steps.

The worker's part of `vtoken_bench.slices`. Some requests are replaced between two slices, which is
not measured, so that lengths stay the same on average.

    hold    {"requests": [{"first": REQUEST, "again": REQUEST, "phase": n}], "lives_slices": L}
    slice   number of steps

REQUEST is {"prompt": [ids], "num_new": n, "arguments": {...}}. Before slice s, requests with
(s + phase) mod L = 0 are replaced by their `again`. The first ones start as if `phase` slices had
passed: their prompt `first` is longer.
"""

from __future__ import annotations

import time
from typing import Any

from vtoken_bench.counters import Instructions

WARM_STEPS = 3  # not measured, because another engine used the CPU caches since
MAX_STEPS = 1000  # to compute the prompts of replaced requests


class HeldRequests:
    """The requests that keep running on `engine`; `hooks` times vToken's own code."""

    def __init__(
        self, engine: Any, hooks: Any, instructions: Instructions, spec: dict[str, Any]
    ) -> None:
        self._engine, self._hooks, self._instructions = engine, hooks, instructions
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._requests = spec["requests"]
        self._lives_slices = spec["lives_slices"]
        self._names: list[str] = []
        self._added = self._slices = 0
        for request in self._requests:
            self._names.append(self._add(request["first"]))

    def slice(self, num_steps: int) -> dict[str, Any]:
        """Replace due requests, step until all decode, then measure `num_steps` steps.

        Raises RuntimeError when a step did not give every request a token: the slice would not be
        comparable.
        """
        self._replace()
        engine, count = self._engine, len(self._requests)
        self._step_until_all_decode()
        for _ in range(WARM_STEPS):
            engine.step()
        self._hooks.reset()
        before, steps_ms = self._num_computed(), []
        instructions, cpu = self._instructions.read(), time.process_time()
        last = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
            now = time.perf_counter()
            steps_ms.append((now - last) * 1e3)
            last = now
        cpu = time.process_time() - cpu
        after = self._instructions.read()
        if len(self._scheduler.running) != count:
            raise RuntimeError("a held request ended before it was replaced: it needs more tokens")
        self._slices += 1
        num_tokens = self._num_computed() - before
        if num_tokens != count * num_steps:
            raise RuntimeError(
                f"{num_tokens} tokens in {num_steps} steps of {count} requests, "
                f"not {count * num_steps}"
            )
        return {
            "steps_ms": steps_ms,
            "cpu_seconds": cpu,
            "instructions": None if after is None else after - (instructions or 0),
            "tokens": num_tokens,
        }

    def close(self) -> None:
        """Abort all requests."""
        self._engine.abort_request(self._names, internal=False)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _replace(self) -> None:
        if self._slices == 0:
            return
        for i, request in enumerate(self._requests):
            if (self._slices + request["phase"]) % self._lives_slices == 0:
                self._engine.abort_request([self._names[i]], internal=False)
                self._names[i] = self._add(request["again"])

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=request["num_new"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=request.get("arguments"),
        )
        name = f"held-{self._added}"
        self._added += 1
        self._engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        return name

    def _step_until_all_decode(self) -> None:
        for _ in range(MAX_STEPS):
            if self._all_decode():
                return
            self._engine.step()
        raise RuntimeError(f"a request does not decode after {MAX_STEPS} steps: enlarge the cache")

    def _all_decode(self) -> bool:
        running = self._scheduler.running
        return (
            not self._scheduler.waiting
            and len(running) == len(self._requests)
            and all(r.num_computed_tokens >= r.num_prompt_tokens for r in running)
        )

    def _num_computed(self) -> int:
        return sum(int(request.num_computed_tokens) for request in self._scheduler.running)
