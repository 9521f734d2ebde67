"""The three streams that copies and reports use, and the events between them.

Independent of caches and steps.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch


class Stream(Enum):
    MAIN = "main"  # vLLM's: forward, sampling, input preparation
    RELOCATION = "relocation"
    REPORT = "report"  # transfer of scores to the host


class Streams:
    """One queue in program order, for devices without streams: every event is complete at once.

    Only `synchronize` may make the host wait.
    """

    def record(self, stream: Stream) -> Any:
        """An event that completes when all work launched on `stream` so far is done."""
        return stream

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
    """The thread's current stream, which is vLLM's, and two more of the same priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side_streams = {
            stream: torch.cuda.Stream(device) for stream in (Stream.RELOCATION, Stream.REPORT)
        }

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._side_streams.get(stream) or torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(stream)):
            work()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(self._stream(stream))
