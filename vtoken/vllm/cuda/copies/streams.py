"""The four streams that copies and reports use, and the events between them.

Independent of caches and steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch


class Stream(Enum):
    MAIN = "main"  # vLLM's: forward, sampling, input preparation
    RELOCATION = "relocation"
    REPORT = "report"  # transfer of scores to the host
    PARK = "park"  # transfer of parked tokens to the host and back


class Streams:
    """One queue in program order, for devices without streams: every event is complete at once.

    Only `synchronize` may make the host wait.
    """

    def record(self, stream: Stream, *, timed: bool = False) -> Any:  # noqa: ARG002
        """An event that completes when all work launched on `stream` so far is done.

        `timed`: for `elapsed_us`.
        """
        return time.perf_counter_ns()

    def elapsed_us(self, start: Any, end: Any) -> float | None:
        """The time between two timed events; None while `end` is not complete."""
        return float(end - start) / 1000

    def wait(self, stream: Stream, event: Any) -> None:
        """Make all work launched on `stream` from now on start after `event`."""

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:  # noqa: ARG002
        """Run `work`, whose device calls go to `stream`."""
        work()

    def synchronize(self, event: Any) -> None:
        """Make the host wait for `event`."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of `tensor`, which may be dropped now, until all work launched on
        `stream` so far is done. Needed where that is not the stream that made it.
        """


class CUDAStreams(Streams):
    """The thread's current stream, which is vLLM's, and three more of the same priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side_streams: dict[Stream, torch.cuda.Stream] = {
            stream: torch.cuda.Stream(device) for stream in Stream if stream is not Stream.MAIN
        }

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._side_streams.get(stream) or torch.cuda.current_stream(self._device)

    def record(self, stream: Stream, *, timed: bool = False) -> torch.cuda.Event:
        # A thread that waits for a blocking event sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True, enable_timing=timed)
        event.record(self._stream(stream))
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return start.elapsed_time(end) * 1000 if end.query() else None

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(stream)):
            work()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(self._stream(stream))
