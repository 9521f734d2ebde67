"""Asynchronous scheduling on CPU, for tests and the soak: vLLM's own scheduler, loop and runner.

vLLM switches it off on CPU because nothing is gained there; nothing in it needs a GPU but the
streams and events around the copy of the sampled tokens, which stand still here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch


class Stream:
    """A stream on which everything has happened already; an event too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def async_scheduling() -> Iterator[None]:
    """Engines made inside are scheduled asynchronously; keep it open for as long as they run."""
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
