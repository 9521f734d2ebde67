"""What copies and reports need of a device's queues: three streams, and events between them.

Knows neither caches nor steps. `CUDAStreams` are real ones; `HostStreams` run everything at once in
program order, which is what a device without streams does, and what the CPU tests run.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch


class Stream(Enum):
    MAIN = "main"  # vLLM's: forward, sampling, input preparation
    RELOCATION = "relocation"
    REPORT = "report"  # scores on their way to the host


class Streams(Protocol):
    """Order between the queues of one device; nothing here makes the host wait but `synchronize`.

    `record`: an event that is reached when all that was launched on `stream` so far is done.
    `wait`: what is launched on `stream` from now on starts after `event`.
    `launch`: run `work`, whose device calls go to `stream`.
    `synchronize`: the host waits for `event`.
    """

    def record(self, stream: Stream) -> Any: ...

    def wait(self, stream: Stream, event: Any) -> None: ...

    def launch(self, stream: Stream, work: Callable[[], None]) -> None: ...

    def synchronize(self, event: Any) -> None: ...


class HostStreams:
    """One queue in program order: every event is reached by the time it is recorded."""

    def record(self, stream: Stream) -> Stream:
        return stream

    def wait(self, stream: Stream, event: Any) -> None:
        pass

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:  # noqa: ARG002
        work()

    def synchronize(self, event: Any) -> None:
        pass


class CUDAStreams:
    """The thread's current stream, which is vLLM's, and two beside it of the same priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = {
            stream: torch.cuda.Stream(device) for stream in (Stream.RELOCATION, Stream.REPORT)
        }

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._beside.get(stream) or torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(stream)):
            work()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()
