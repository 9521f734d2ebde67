"""What the forwards of an engine were: their CUDA graphs, and their time on the GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

MODES = ("FULL", "PIECEWISE", "NONE")


class Forwards:
    """Counts from construction on, or from `reset`.

    Graph modes are those that vLLM reports with the argument `cudagraph_metrics`. The GPU's time is
    that between two events, at the begin and the end of a forward: on a host that is late, with the
    time in which the GPU waits for its launches. Only Model Runner V2 has places for them.
    """

    def __init__(self, scheduler: Any, runner: Any) -> None:
        self._modes: Counter[tuple[str, str]] = Counter()
        self._num_tokens = 0
        self._events: list[tuple[Any, Any]] = []
        self._started: Any = None
        self._times = torch.cuda.is_available() and hasattr(runner, "step_timing")
        update = scheduler.update_from_output

        def noted(scheduled: Any, output: Any) -> Any:
            self._note(scheduled, output.cudagraph_stats)
            return update(scheduled, output)

        scheduler.update_from_output = noted
        if self._times:
            begins, ends = runner.step_timing.forward_start, runner.kv_connector.finish_forward

            def begin() -> None:
                begins()
                self._started = _recorded()

            def end() -> None:
                self._events.append((self._started, _recorded()))
                ends()

            runner.step_timing.forward_start = begin
            runner.kv_connector.finish_forward = end

    def reset(self) -> None:
        self._modes.clear()
        self._num_tokens = 0
        self._events.clear()

    def facts(self) -> dict[str, Any]:
        """`computed_tokens`: those that all forwards computed. `graphs`: how many forwards had
        each mode, by kind; empty where vLLM reports none.

        `gpu_seconds`: of all forwards, None without a GPU; waits for the last one.
        """
        graphs: dict[str, dict[str, int]] = {}
        for (kind, mode), count in self._modes.items():
            graphs.setdefault(kind, dict.fromkeys(MODES, 0))[mode] += count
        seconds = None
        if self._times:
            torch.cuda.synchronize()
            seconds = sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        return {
            "computed_tokens": self._num_tokens,
            "graphs": graphs,
            "gpu_seconds": seconds,
        }

    def _note(self, scheduled: Any, stats: Any) -> None:
        self._num_tokens += scheduled.total_num_scheduled_tokens
        if stats is not None:
            decodes = scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens)
            self._modes["decode" if decodes else "mixed", stats.runtime_mode] += 1


def _recorded() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
