"""Requests that keep running on one engine, measured in short slices of decode steps.

The worker's half of `vtoken.bench.slices`. Between two slices some requests are replaced, so that
lengths stay the same on average; what that takes is not measured.

    hold    {"requests": [{"first": REQUEST, "again": REQUEST, "phase": n}], "lives_slices": L}
    slice   how many steps

REQUEST is {"prompt": [ids], "num_new": n, "arguments": {...}}. Before slice s, requests with
(s + phase) mod L = 0 are replaced by their `again`; in its first life a request has `phase`
slices behind it, which its longer prompt `first` stands for.
"""

from __future__ import annotations

import time
from typing import Any

from vtoken.bench.counters import Instructions

WARM_STEPS = 3  # not measured: another engine has had the caches since
MOST_STEPS = 1000  # to compute the prompts of those that were replaced


class Held:
    """The requests that are held on `engine`; `hooks` times vToken's own code."""

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
        """Replace who is due, let all decode, then measure `num_steps` steps.

        Raises RuntimeError when a step did not give every request a token: it would not be
        comparable.
        """
        self._replace()
        engine, count = self._engine, len(self._requests)
        steps = 0
        while not self._all_decode():
            engine.step()
            steps += 1
            if steps == MOST_STEPS:
                raise RuntimeError("some request does not get to decode: is the cache too small?")
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
        self._slices += 1
        found = self._num_computed() - before
        if found != count * num_steps:
            raise RuntimeError(f"{found} tokens in {num_steps} steps of {count} requests")
        return {
            "steps_ms": steps_ms,
            "cpu_seconds": cpu,
            "instructions": None if after is None else after - (instructions or 0),
            "tokens": found,
        }

    def close(self) -> None:
        """Abort all of them."""
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

    def _all_decode(self) -> bool:
        running = self._scheduler.running
        return len(running) == len(self._requests) and all(
            request.num_computed_tokens >= request.num_prompt_tokens for request in running
        )

    def _num_computed(self) -> int:
        return sum(int(request.num_computed_tokens) for request in self._scheduler.running)
