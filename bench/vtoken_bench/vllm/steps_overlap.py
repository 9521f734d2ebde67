"""Asynchronous scheduling on CPU, for tests and the soak: vLLM's own scheduler, loop and runner.

vLLM turns it off on CPU because it has no benefit there. Only the streams and events around the
copy of the sampled tokens need a GPU; here they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch


class Stream:
    """A stream, and an event, on which all work is complete at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def async_scheduling() -> Iterator[None]:
    """Schedule engines made inside asynchronously; keep it open while they run."""
    import torch
    from vllm import EngineArgs

    create = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = True  # the CPU platform has set it to False
        return config

    with ExitStack() as stack:
        for owner, name, value in (
            (EngineArgs, "create_engine_config", create_engine_config),
            (torch.cuda, "Event", Stream),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "current_stream", Stream),
            (torch.cuda, "stream", lambda _: nullcontext()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
