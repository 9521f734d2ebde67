"""A recording of the real core at work, made quickly and without a network."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.support.core.live import make_engine
from tests.support.documents import hello_of
from vtoken import wire
from vtoken.recording import RecordingWriter
from vtoken.wire.engine_state import Difference, EngineState
from vtoken_api.fanout.cursor import TOPICS, StateCursor

START_TS = 1_800_000_000.0


def record(
    path: Path,
    seconds: float = 60.0,
    *,
    fps: float = 5.0,
    num_blocks: int = 200,
    concurrency: int = 5,
    epoch: str = "e1",
) -> None:
    """Record `seconds` of a busy pool from START_TS on, a step a frame; theta_F changes halfway."""
    core = make_engine(
        num_blocks=num_blocks,
        config={
            "policy": {"name": "random"},
            "budget_tokens": 96,
            "evict_when": "always",
            "interval_tokens": 16,
            "theta_f": 0.25,
            "low_watermark_blocks": num_blocks - 1,
            "recycle": False,
        },
        concurrency=concurrency,
        prompt_tokens=180,
        max_tokens=150,
        epoch=epoch,
        model="demo/test-llama",
    )
    cursor, seq = StateCursor(frozenset(TOPICS), packed=False), 0

    def state(ts: float) -> EngineState:
        frame: wire.Frame = core.controller.frame()
        assert frame.status is not None
        frame.status.ts = ts
        return EngineState().after(Difference.of(frame))

    try:
        core.steps(20)
        with RecordingWriter(path, source="http://127.0.0.1:8000") as writer:

            def say(kind: Any, ts: float, **fields: Any) -> None:
                nonlocal seq
                seq += 1
                message = kind(epoch=epoch, seq=seq, step=core.runtime.step, ts=ts, **fields)
                text = msgspec.json.encode(message)
                writer.take(text, msgspec.json.decode(text, type=wire.StreamMessage))

            about = partial(hello_of, core.call("describe"))
            say(about, START_TS, topics=sorted(TOPICS), fps=fps)
            say(wire.Snapshot, START_TS, **cursor.snapshot(state(START_TS)))
            core.runtime.events.drain()  # of before
            frames = int(seconds * fps)
            for frame in range(1, frames + 1):
                ts = START_TS + frame / fps
                core.steps()
                if frame == frames // 2:
                    core.call("patch_config", patch={"theta_f": 0.4})
                for event in core.runtime.events.drain():
                    say(wire.EventMessage, ts, event=msgspec.structs.replace(event, ts=ts))
                say(wire.Delta, ts, **cursor.delta(state(ts)))
    finally:
        core.close()
