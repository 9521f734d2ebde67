"""The three streams that copies and reports use, and the events between them.

Independent of caches and steps. `CUDAStreams` are real streams. `HostStreams` run everything at
once in program order, for devices without streams and for the CPU tests.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch


class Stream(Enum):
    MAIN = "main"  # vLLM's: forward, sampling, input preparation
    RELOCATION = "relocation"
    REPORT = "report"  # transfer of scores to the host


class Streams(Protocol):
    """Order between the streams of one device. Only `synchronize` makes the host wait.

    `record`: return an event that completes when all work launched on `stream` so far is done.
    `wait`: make all work launched on `stream` from now on start after `event`.
    `launch`: run `work`, whose device calls go to `stream`.
    `synchronize`: make the host wait for `event`.
    `keep`: keep the memory of `tensor`, which may be dropped now, until all work launched on
    `stream` so far is done. Needed where that is not the stream that made it.
    """

    def record(self, stream: Stream) -> Any: ...

    def wait(self, stream: Stream, event: Any) -> None: ...

    def launch(self, stream: Stream, work: Callable[[], None]) -> None: ...

    def synchronize(self, event: Any) -> None: ...

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None: ...


class HostStreams:
    """One queue in program order: every event is complete when it is recorded."""

    def record(self, stream: Stream) -> Stream:
        return stream

    def wait(self, stream: Stream, event: Any) -> None:
        pass

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:  # noqa: ARG002
        work()

    def synchronize(self, event: Any) -> None:
        pass

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass


class CUDAStreams:
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
