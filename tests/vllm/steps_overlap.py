"""Asynchronous scheduling on CPU, for tests: vLLM's own async scheduler, engine loop and runner.

vLLM switches it off on CPU because nothing is gained there; nothing in it needs a GPU but the
streams and events around the copy of the sampled tokens, which stand still here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineArgs, "create_engine_config", create_engine_config)
        patch.setattr(torch.cuda, "Event", Stream)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        yield
