"""One load on one engine: requests of given lengths, and when each of them got its tokens.

The clock is the engine's own: it runs while a step runs, and jumps to the next arrival when there
is nothing to do. What is looked at between two steps takes no time on it. A request arrives when
the load says, or, in a closed loop, when an earlier one finishes; from there its latencies count,
waiting included.

    requests          [{"prompt": [ids], "num_new": n, "arguments": {...}, "arrival_s": t}]
    concurrency       closed loop: so many at a time (default: all at once); no arrivals then
    config            a patch of the configuration, applied before
    sample_every      look at the memory every so many steps
    stop_on_overflow  stop once a request was preempted, or waits while all others only decode
    keep_tokens       answer the tokens of every request too
    natural_end       requests end where the model ends them
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.bench.samples import sample, summary

PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Met:
    """What one request met, in seconds of the load's clock."""

    arrived: float
    times: list[float] = field(default_factory=list)  # of its tokens
    tokens: list[int] = field(default_factory=list)
    finished: float | None = None


class Load:
    """One load; `run` drives it to its end."""

    def __init__(self, engine: Any, spec: dict[str, Any], tag: int) -> None:
        self._engine, self._spec, self._tag = engine, spec, tag
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._runtime = getattr(self._scheduler, "vtoken", None)
        self._queue = list(enumerate(spec["requests"]))
        self._closed = not any("arrival_s" in request for request in spec["requests"])
        self._met: dict[str, Met] = {}
        self._clock = 0.0
        self._stalled = 0  # requests that waited after the last step while all others decoded
        self._preemptions: dict[str, int] = {}
        self._most_running = 0
        self._overflowed = False
        self._busy_s: float | None = None  # when the last request came, in a closed loop
        self._used: list[int] = []
        self._samples: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Every figure of the load; see `_answer`."""
        cpu, steps_ms = time.process_time(), []
        every, stops = self._spec.get("sample_every", 0), self._spec.get("stop_on_overflow")
        if self._closed:
            self._add(self._spec.get("concurrency") or len(self._queue))
        while self._arrive():
            started = time.perf_counter()
            outputs = self._engine.step()
            taken = time.perf_counter() - started
            self._clock += taken
            steps_ms.append(taken * 1e3)
            finished = self._take(outputs)
            self._look(finished)
            if self._overflowed and stops:
                break
            if every and len(steps_ms) % every == 0:
                self._sample()
            if self._closed:
                self._add(finished)
        answer = self._answer(steps_ms, time.process_time() - cpu)
        self._stop()
        return answer

    # ------------------------------------------------------------ requests

    def _arrive(self) -> bool:
        """Add what has arrived, jumping to the next arrival if need be; whether there is work."""
        if not self._closed and self._queue:
            if not self._engine.has_unfinished_requests():
                self._clock = max(self._clock, self._queue[0][1]["arrival_s"])
            while self._queue and self._queue[0][1]["arrival_s"] <= self._clock:
                self._add(1)
        return bool(self._engine.has_unfinished_requests())

    def _add(self, count: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for number, request in self._queue[:count]:
            params = SamplingParams(
                temperature=0,
                max_tokens=request["num_new"],
                ignore_eos=not self._spec.get("natural_end"),
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=request.get("arguments"),
            )
            name = f"{self._tag}-{number}"
            self._met[name] = Met(request.get("arrival_s", self._clock))
            self._engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        del self._queue[:count]
        if self._closed and not self._queue and self._busy_s is None:
            self._busy_s = self._clock

    def _take(self, outputs: Any) -> int:
        """Note the tokens of one step; how many requests are done."""
        finished = 0
        for output in outputs:
            met, ids = self._met[output.request_id], output.outputs[0].token_ids
            met.tokens += ids
            met.times += [self._clock] * len(ids)
            if output.finished:
                met.finished = self._clock
                finished += 1
        return finished

    def _stop(self) -> None:
        """Abort what an early stop left; forget what the prefix cache knows."""
        left = [r.request_id for r in (*self._scheduler.running, *self._scheduler.waiting)]
        if left:
            self._engine.abort_request(left, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.reset_prefix_cache()

    # ------------------------------------------------------------ looking

    def _look(self, finished: int) -> None:
        """Whether somebody was preempted, or waits although nobody computes a prompt.

        A request that waits for two steps in a row in which all others only decode does not fit.
        """
        scheduler = self._scheduler
        for request in (*scheduler.running, *scheduler.waiting):
            if request.num_preemptions:
                self._preemptions[request.request_id] = request.num_preemptions
                self._overflowed = True
        running, waiting = scheduler.get_request_counts()
        self._most_running = max(self._most_running, running)
        before, self._stalled = self._stalled, 0
        decode = all(r.num_computed_tokens >= r.num_prompt_tokens for r in scheduler.running)
        if waiting and decode and not finished:
            self._stalled = waiting
        if waiting and waiting == before == self._stalled:
            self._overflowed = True

    def _sample(self) -> None:
        self._used.append(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())
        found = None if self._runtime is None else sample(self._runtime)
        if found is not None:
            self._samples.append(found)

    def _answer(self, steps_ms: list[float], cpu_seconds: float) -> dict[str, Any]:
        """Times in ms and seconds, memory in blocks; `requests`: arrival, first token, end, tokens.

        `itl`: between two tokens of a request; `ttft`: to its first token; `e2e`: to its last one.
        `busy`: for as long as every client of the closed loop had a request.
        """
        done = [met for met in self._met.values() if met.finished is not None]
        gaps = [gap for met in self._met.values() for gap in np.diff(met.times).tolist()]
        answer: dict[str, Any] = {
            "seconds": self._clock,
            "cpu_seconds": cpu_seconds,
            "steps": len(steps_ms),
            "step_ms": _percentiles(steps_ms),
            "tokens": sum(len(met.tokens) for met in self._met.values()),
            "prompt_tokens": sum(len(r["prompt"]) for r in self._spec["requests"]),
            "requests": [
                [
                    round(t, 5)
                    for t in (met.arrived, met.times[0], met.finished or 0.0, len(met.tokens))
                ]
                for met in done
            ],
            "itl_ms": _percentiles([gap * 1e3 for gap in gaps]),
            "ttft_ms": _percentiles([1e3 * (met.times[0] - met.arrived) for met in done]),
            "e2e_ms": _percentiles([1e3 * ((met.finished or 0) - met.arrived) for met in done]),
            "tokens_hash": self._hash(),
            "most_running": self._most_running,
            "overflowed": self._overflowed,
            "preemptions": sum(self._preemptions.values()),
        }
        if self._busy_s:
            before = sum(t <= self._busy_s for met in self._met.values() for t in met.times)
            answer["busy"] = {"seconds": self._busy_s, "tokens": before}
        if self._used:
            answer["used_blocks"] = {
                "mean": float(np.mean(self._used)),
                "peak": int(np.max(self._used)),
            }
        if self._samples:
            answer["memory"] = summary(self._samples)
        if self._spec.get("keep_tokens"):
            answer["output_ids"] = [self._met[name].tokens for name in self._in_order()]
        return answer

    def _in_order(self) -> list[str]:
        return sorted(self._met, key=lambda name: int(name.split("-")[1]))

    def _hash(self) -> str:
        """Names all tokens of all requests, in the order of the load."""
        text = json.dumps([list(map(int, self._met[name].tokens)) for name in self._in_order()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}
