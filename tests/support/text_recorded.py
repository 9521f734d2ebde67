"""A recording with text, made by `vtoken record --with-text` of the real core at work."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.cli_harness import Ran, run
from tests.support.core.live import LiveEngine, make_quiet
from tests.support.serving import Served
from vtoken import wire
from vtoken.cli import record as record_module
from vtoken.cli import record_text
from vtoken.recording import RecordingReader


def make_evicting() -> LiveEngine:
    """Request "a", past its budget, loses tokens as it decodes; "b" is short and loses none."""
    core = make_quiet()
    core.configure(
        policy={"name": "random", "params": {"sinks": 3}},
        budget_tokens=128,
        evict_when="always",
        interval_tokens=16,
        recycle=False,
        reclamation="paused",
    )
    core.admit("a", 180)
    core.admit("b", 60)
    core.steps(3)
    return core


async def record(served: Served, path: Path, num_calls: int, *flags: str) -> Ran:
    """Record until the text of both requests was requested `num_calls` times, faster than every two
    seconds.
    """

    def monotonic() -> float:
        calls = Counter(call.request_id for call in served.calls_of("text"))
        return math.inf if min(calls["a"], calls["b"]) >= num_calls else 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_text, "EVERY_S", 0.2)
        patch.setattr(record_text, "TURN_S", 0.1)
        patch.setattr(record_module, "time", SimpleNamespace(monotonic=monotonic))
        return await run(
            "record", str(path), "--duration", "1h", "--with-text", *flags, "--url", served.url
        )


def lines_of(path: Path) -> list[wire.RecordingLine]:
    with RecordingReader(path) as reader:
        return [entry.line for entry in iter(reader.next, None)]


def text_of(page: wire.TextPage) -> str:
    return "".join(row.text or "" for row in page.rows)
