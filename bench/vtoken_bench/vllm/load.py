"""One load on one engine: requests of given lengths, and the times of their tokens.

The clock advances only during steps and jumps to the next arrival when the engine is idle, so
measuring between steps takes no time on it. A request arrives at its arrival time or, in a closed
loop, when an earlier one finishes. Latencies count from the arrival and include waiting.

    requests          [{"prompt": [ids], "num_new": n, "arguments": {...}, "arrival_s": t,
                      "priority": n, "computed": n, "natural_end": bool, "after": n,
                      "turn": n}]; `computed`: the prompt's newest tokens that no prefix-cache
                      hit replaces; `after`, in a closed loop: the number of the request whose
                      place it takes; `turn`: of its chat, whose times are also given apart
    concurrency       closed loop: requests at a time (default: all); excludes arrival times
    config            a patch of the configuration, applied first
    max_running       most requests that run at once, vLLM's `max_num_active_seqs` for this load
    keep_tokens       return the tokens of every request too
    keep_prefixes     leave the prefix cache to the next load
    turn_s            take turns with other engines, see the worker
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 95, 99)
OVER_S = 0.5


@dataclass(slots=True)
class RequestTimes:
    """The times of one request, in seconds of the load's clock, and its tokens."""

    arrived: float
    times: list[float] = field(default_factory=list)  # one per token
    tokens: list[int] = field(default_factory=list)
    finished: float | None = None
    hit_tokens: int = 0  # of the prompt: found in the prefix cache at the first start


class Outlived:
    """Of the tokens that gave way, those whose request still ran when the shortage was over: when
    for `OVER_S` nobody had waited for blocks and nobody had given.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._given: dict[str, int] = {}  # by request: in all, as of the last step
        self._pending: dict[str, int] = {}  # by request: since the last shortage was over
        self._short_at = 0.0
        self.tokens = 0

    def note(self, clock: float) -> None:
        """After a step that ended at `clock`, in seconds."""
        held = self._scheduler.vtoken.requests.held
        given = {name: request.given_tokens for name, request in held.items()}
        gave = {name: count - self._given.get(name, 0) for name, count in given.items()}
        self._given = given
        self._pending = {name: self._pending.get(name, 0) + new for name, new in gave.items()}
        if any(gave.values()) or self._scheduler.waiting:
            self._short_at = clock
        elif clock - self._short_at >= OVER_S:
            self.tokens += sum(self._pending.values())
            self._pending = {}


class Load:
    """One load; `run` executes it."""

    def __init__(self, engine: Any, spec: dict[str, Any], tag: int) -> None:
        self._engine, self._spec, self._tag = engine, spec, tag
        self._scheduler = engine.engine_core.engine_core.scheduler
        numbered = list(enumerate(spec["requests"]))
        self._queue = [(n, request) for n, request in numbered if "after" not in request]
        self._after = {r["after"]: (n, r) for n, r in numbered if "after" in r}
        self._closed = not any("arrival_s" in request for request in spec["requests"])
        self._times: dict[str, RequestTimes] = {}
        self._clock = 0.0
        self._preemptions: dict[str, int] = {}
        self._most_running = 0
        self._running_s = 0.0  # requests that ran, times the seconds of their steps
        self._busy_s: float | None = None  # arrival of the last request, in a closed loop
        evicts = getattr(self._scheduler, "vtoken", None) is not None
        self._outlived = Outlived(self._scheduler) if evicts else None

    def run(self, between_steps: Callable[[], None]) -> dict[str, Any]:
        """Run the load; return its measurements, see `_result`. `between_steps` may wait."""
        cpu, steps_ms = 0.0, []
        most, limit = self._scheduler.max_num_active_reqs, self._spec.get("max_running")
        self._scheduler.max_num_active_reqs = min(most, limit or most)
        if self._closed:
            self._add(self._spec.get("concurrency") or len(self._queue))
        while self._arrive():
            between_steps()
            started, cpu_before = time.perf_counter(), time.process_time()
            outputs = self._engine.step()
            taken = time.perf_counter() - started
            cpu += time.process_time() - cpu_before
            self._clock += taken
            steps_ms.append(taken * 1e3)
            finished = self._record(outputs)
            self._count_running(len(finished), taken)
            if self._outlived is not None:
                self._outlived.note(self._clock)
            if self._closed:
                self._replace(finished)
        result = self._result(steps_ms, cpu)
        if not self._spec.get("keep_prefixes"):
            self._engine.reset_prefix_cache()
        self._scheduler.max_num_active_reqs = most
        return result

    # ------------------------------------------------------------ requests

    def _arrive(self) -> bool:
        """Add arrived requests, jumping to the next arrival if idle; return whether any run."""
        if not self._closed and self._queue:
            if not self._engine.has_unfinished_requests():
                self._clock = max(self._clock, self._queue[0][1]["arrival_s"])
            while self._queue and self._queue[0][1]["arrival_s"] <= self._clock:
                self._add(1)
        return bool(self._engine.has_unfinished_requests())

    def _add(self, count: int) -> None:
        """Of the queue."""
        for number, request in self._queue[:count]:
            self._send(number, request)
        del self._queue[:count]
        if self._closed and not self._queue and self._busy_s is None:
            self._busy_s = self._clock

    def _replace(self, finished: list[int]) -> None:
        """By each one's follower, or by the next of the queue."""
        for number in finished:
            if number in self._after:
                self._send(*self._after[number])
            else:
                self._add(1)

    def _send(self, number: int, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=request["num_new"],
            ignore_eos=not request.get("natural_end"),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=request.get("arguments"),
        )
        name = f"{self._tag}-{number}"
        self._times[name] = RequestTimes(request.get("arrival_s", self._clock))
        prompt, priority = {"prompt_token_ids": request["prompt"]}, request.get("priority", 0)
        self._engine.add_request(name, prompt, params, priority=priority)
        if "computed" in request:
            self._make_unique(name, len(request["prompt"]) - request["computed"])

    def _make_unique(self, name: str, first_token: int) -> None:
        """Give the prompt's blocks from that of `first_token` on hashes that no other request has.

        A policy scores only computed tokens. So requests of one prompt can share the prefix that
        their signals do not need, and each computes the rest.
        """
        scheduler = self._scheduler
        (request,) = (r for key, r in scheduler.requests.items() if key.startswith(f"{name}-"))
        for block in range(max(0, first_token) // scheduler.block_size, len(request.block_hashes)):
            request.block_hashes[block] = hashlib.sha256(f"{name}/{block}".encode()).digest()

    def _record(self, outputs: Any) -> list[int]:
        """Record the tokens of one step; return the numbers of finished requests."""
        finished = []
        for output in outputs:
            times, ids = self._times[output.request_id], output.outputs[0].token_ids
            times.tokens += ids
            times.times += [self._clock] * len(ids)
            times.hit_tokens = output.num_cached_tokens
            if output.finished:
                times.finished = self._clock
                finished.append(_number(output.request_id))
        return finished

    # ------------------------------------------------------------ measuring

    def _count_running(self, finished: int, step_s: float) -> None:
        """Of the step that took `step_s`; `finished`: requests that ended in it."""
        scheduler = self._scheduler
        for request in (*scheduler.running, *scheduler.waiting):
            if request.num_preemptions:
                self._preemptions[request.request_id] = request.num_preemptions
        running, _ = scheduler.get_request_counts()
        self._most_running = max(self._most_running, running)
        self._running_s += (running + finished) * step_s

    def _result(self, steps_ms: list[float], cpu_seconds: float) -> dict[str, Any]:
        """Times in ms and seconds; `requests`: arrival, first token, end, tokens.

        `itl`: between two tokens of a request; `ttft`: to its first token; `e2e`: to its last one.
        `busy`: the time in which every client of the closed loop had a request. `hit_tokens`: of
        prompts, found in the prefix cache; what a preempted request finds again does not count.
        """
        all_times = self._times.values()
        done = [times for times in all_times if times.finished is not None]
        gaps = [gap for times in all_times for gap in np.diff(times.times).tolist()]
        result: dict[str, Any] = {
            "seconds": self._clock,
            "cpu_seconds": cpu_seconds,
            "steps": len(steps_ms),
            "step_ms": _percentiles(steps_ms),
            "tokens": sum(len(times.tokens) for times in all_times),
            "prompt_tokens": sum(len(r["prompt"]) for r in self._spec["requests"]),
            "hit_tokens": sum(times.hit_tokens for times in all_times),
            "requests": [
                [
                    round(value, 5)
                    for value in (t.arrived, t.times[0], t.finished or 0.0, len(t.tokens))
                ]
                for t in done
            ],
            "itl_ms": _percentiles([gap * 1e3 for gap in gaps]),
            "ttft_ms": _ttft_ms(done),
            "e2e_ms": _percentiles([1e3 * ((t.finished or 0) - t.arrived) for t in done]),
            "tokens_hash": self._hash(),
            "most_running": self._most_running,
            "mean_running": self._running_s / self._clock,
            "preemptions": sum(self._preemptions.values()),
        }
        if self._outlived is not None:
            result["outlived_tokens"] = self._outlived.tokens
        if self._busy_s:
            before = sum(t <= self._busy_s for times in all_times for t in times.times)
            result["busy"] = {"seconds": self._busy_s, "tokens": before}
        if turns := self._by_turn():
            result["turn_ttft_ms"] = {turn: _ttft_ms(times) for turn, times in turns.items()}
        if self._spec.get("keep_tokens"):
            result["output_ids"] = [self._times[name].tokens for name in self._in_order()]
        return result

    def _by_turn(self) -> dict[str, list[RequestTimes]]:
        found: dict[str, list[RequestTimes]] = {}
        for number, request in enumerate(self._spec["requests"]):
            if "turn" in request:
                found.setdefault(str(request["turn"]), []).append(
                    self._times[f"{self._tag}-{number}"]
                )
        return found

    def _in_order(self) -> list[str]:
        return sorted(self._times, key=_number)

    def _hash(self) -> str:
        """A hash of all tokens of all requests, in the order of the load."""
        text = json.dumps([list(map(int, self._times[name].tokens)) for name in self._in_order()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _number(request_id: str) -> int:
    """Of a request in the load, from the name that it was given."""
    return int(request_id.split("-")[1])


def _ttft_ms(requests: Sequence[RequestTimes]) -> dict[str, float] | None:
    return _percentiles([1e3 * (times.times[0] - times.arrived) for times in requests])


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = np.percentile(values, PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)}
