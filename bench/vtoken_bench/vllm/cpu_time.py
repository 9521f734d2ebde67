"""CPU time of this process by the code that spends it, sampled from its stacks.

Sampling changes no code, so it charges a function for no call, and two versions of a program are
compared without naming a function of either. A sample is the process's CPU time since the last one;
it belongs to the main thread's stack. Of a stack, `Place` is decided from the innermost frame
outwards: code outside vToken, vLLM and the benchmark (torch, numpy, Triton) belongs to its caller.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import vllm

import vtoken
from vtoken_bench.host import ATTENTION, BENCH, FRONT, LOOP, SCHEDULER, VLLM, VTOKEN, WORKER

ROOTS = {
    VTOKEN: Path(vtoken.__file__).parent,
    VLLM: Path(vllm.__file__).parent,
    BENCH: Path(__file__).parents[1],
}
SIDES = (  # of a frame: who owns the code, how its path begins, the side
    (VTOKEN, "vllm/engine/", SCHEDULER),
    (VTOKEN, "vllm/worker/", WORKER),
    (VTOKEN, "vllm/cuda/", WORKER),
    (VLLM, "v1/core/", SCHEDULER),
    (VLLM, "v1/attention/", WORKER),
    (VLLM, "v1/worker/", WORKER),
    (VLLM, "v1/executor/", WORKER),
    (VLLM, "v1/engine/core.py", LOOP),
)
INTERVAL_S = 0.001


class Place(NamedTuple):
    """Whose code ran: `owner`, its side of the engine, and its file below the owner's package."""

    owner: str
    side: str
    file: str


class Frame(NamedTuple):
    """What a frame's file says: `side` is "" where both sides use it."""

    owner: str
    side: str
    file: str


@cache
def _frame(filename: str) -> Frame | None:
    for owner, root in ROOTS.items():
        if filename.startswith(f"{root}/"):
            file = filename.removeprefix(f"{root}/")
            fits = (s for o, start, s in SIDES if o == owner and file.startswith(start))
            return Frame(owner, next(fits, ""), file)
    return None


def place(frame: FrameType | None) -> Place:
    """Whose code runs in `frame`.

    vLLM's code that a function of vToken calls belongs to vToken, unless it is the method that the
    function extends, which has its name. Inside the model, vLLM's code is `ATTENTION`.
    """
    found: Frame | None = None
    side, extended, open_ = "", "", True
    while frame is not None:
        code = frame.f_code
        here = _frame(code.co_filename)
        if here is not None:
            if found is None:
                found = here
            elif open_ and found.owner == VLLM and here.owner == VTOKEN:
                open_ = False
                if code.co_name != extended:
                    found = here
            if here.owner == VLLM and open_:
                extended = code.co_name
            if here.owner == BENCH and code.co_name == "__call__" and found.owner == VLLM:
                side = ATTENTION
            side = side or here.side
        frame = frame.f_back
    if found is None:
        return Place(BENCH, FRONT, "")
    return Place(found.owner, side or FRONT, found.file)


class CPUTime:
    """A context in the main thread. `ns`: CPU time of the process by place, since the last `take`.

    `total_ns`: of all places, at the end. Both are without the time of taking the samples.
    """

    def __init__(self) -> None:
        self.ns: Counter[Place] = Counter()
        self.total_ns = 0
        self._sampling = False

    def __enter__(self) -> CPUTime:
        self._before = signal.signal(signal.SIGALRM, self._sample)
        self._last = time.process_time_ns()
        self.total_ns -= self._last
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        now = time.process_time_ns()
        self.ns[Place(BENCH, FRONT, "")] += now - self._last
        self.total_ns += now

    def take(self) -> Counter[Place]:
        found, self.ns = self.ns, Counter()
        return found

    def _sample(self, _: int, frame: FrameType | None) -> None:
        if self._sampling:  # the next signal, before this one is handled
            return
        self._sampling = True
        now = time.process_time_ns()
        self.ns[place(frame)] += now - self._last
        self._last = time.process_time_ns()
        self.total_ns -= self._last - now
        self._sampling = False
