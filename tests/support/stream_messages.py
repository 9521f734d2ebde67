"""A stream in JSON form, made from a random pool by the server's own cursor."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.documents import hello_of
from tests.support.scripted import ScriptedEngine
from vtoken import wire
from vtoken.wire.engine_state import Difference, EngineState
from vtoken_api.fanout.cursor import TOPICS, StateCursor

START_TS = 1_800_000_000.0


def stream(
    num_messages: int, *, seed: int = 0, num_blocks: int = 64, fps: float = 5.0
) -> Iterator[tuple[wire.StreamMessage, EngineState]]:
    """Messages of a server, each with the resulting state; the same in every run."""
    engine = ScriptedEngine(num_blocks=num_blocks, seed=seed)

    def state_at(ts: float) -> EngineState:
        frame = engine.frame()
        assert frame.status is not None
        frame.status.ts, frame.status.latency = ts, None  # both are measured
        return EngineState().after(Difference.of(frame))

    try:
        about = engine.describe()
        cursor = StateCursor(frozenset(TOPICS), packed=False)
        for n in range(num_messages):
            head = {"epoch": "e1", "seq": n + 1, "step": engine.steps, "ts": START_TS + n / fps}
            state = state_at(head["ts"])
            if n == 0:
                yield hello_of(about, **head, topics=list(TOPICS), fps=fps), state
            elif n == 1:
                yield wire.Snapshot(**head, **cursor.snapshot(state)), state
            elif n % 7 == 0:
                kind: wire.EventKind = "config" if n % 2 else "server"
                event = wire.Event(
                    seq=n, ts=head["ts"], step=engine.steps, kind=kind, summary=f"event {n}"
                )
                yield wire.EventMessage(**head, event=event), state
            else:
                engine.step()
                state = state_at(head["ts"])
                yield wire.Delta(**head, **cursor.delta(state)), state
    finally:
        engine.close()
