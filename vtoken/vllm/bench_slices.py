"""Requests that keep running on one engine, measured in short slices of decode steps.

The worker's half of `vtoken.bench.slices`. Between two slices some requests are replaced, so that
lengths stay the same on average; what that takes is not measured.

    hold    {"requests": [{"first": REQUEST, "again": REQUEST, "phase": n}], "lives_slices": L,
             "ends": REQUEST or null}
    slice   how many steps

REQUEST is {"prompt": [ids], "num_new": n, "arguments": {...}}. Before slice s, requests with
(s + phase) mod L = 0 are replaced by their `again`; in its first life a request has `phase`
slices behind it, which its longer prompt `first` stands for. `ends` is one more request, which
comes and finishes before every slice; its canary check then runs in the slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vtoken.bench.counters import Instructions
from vtoken.vllm.engine.canary.checks import ID_PREFIX

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
        self._ends = spec["ends"]
        self._names: list[str] = []
        self._added = self._slices = 0
        for request in self._requests:
            self._names.append(self._add(request["first"]))

    def slice(self, num_steps: int) -> dict[str, Any]:
        """Replace who is due, let all decode, then measure `num_steps` steps.

        Raises RuntimeError when a step did not give every request a token, or when the check of a
        request that ended did not run in every step: it would not be comparable.
        """
        self._replace()
        engine, count = self._engine, len(self._requests)
        self._step_until(self._all_decode)
        if self._ends is not None:
            self._step_until(lambda: not self._check_runs())
            self._add(self._ends)
            self._step_until(self._all_decode)
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
        if self._check_runs() != (self._ends is not None):
            raise RuntimeError("a check ran that should not, or was over before the slice")
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

    def _step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if condition():
                return
            self._engine.step()
        raise RuntimeError("some request does not get to decode: is the cache too small?")

    def _running(self) -> list[Any]:
        """The held requests that run: a check of the canary is none of them."""
        return [r for r in self._scheduler.running if not r.request_id.startswith(ID_PREFIX)]

    def _check_runs(self) -> bool:
        return len(self._running()) < len(self._scheduler.running)

    def _all_decode(self) -> bool:
        running = self._running()
        return (
            not self._scheduler.waiting
            and len(running) == len(self._requests)
            and all(r.num_computed_tokens >= r.num_prompt_tokens for r in running)
        )

    def _num_computed(self) -> int:
        return sum(int(request.num_computed_tokens) for request in self._running())
