"""A recording of the test server's pool, made without a network and in no time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tests.support.fake_console.fake_server import FakeServer
from vtoken import wire
from vtoken.recording import Recorder, RecordingWriter

START_TS = 1_800_000_000.0


def record(
    path: Path, seconds: float = 60.0, *, fps: float = 5.0, num_blocks: int = 200, epoch: str = "e1"
) -> FakeServer:
    """`seconds` of a busy pool from START_TS on; theta_F changes in the middle."""
    fake = FakeServer(num_blocks=num_blocks, num_requests=5, epoch=epoch)
    fake._fill()
    pool = fake.pool
    seq, sent_event = 0, fake.events[-1].seq
    with RecordingWriter(path, source="http://127.0.0.1:8000") as writer:
        recorder = Recorder(writer)

        def say(kind: type, ts: float, **fields: object) -> None:
            nonlocal seq
            seq += 1
            message = kind(epoch=epoch, seq=seq, step=fake.step, ts=ts, **fields)
            text = msgspec.json.encode(message)
            recorder.take(text, msgspec.json.decode(text, type=wire.StreamMessage))

        def status(ts: float) -> wire.Status:
            return msgspec.structs.replace(fake.status(), ts=ts)

        say(wire.Hello, START_TS, **fake.hello_fields(fps, can_control=True))
        live, flags = pool.live.copy(), pool.flags.copy()
        rows = {r.id: fake.row(r) for r in pool.requests.values()}
        say(
            wire.Snapshot,
            START_TS,
            status=status(START_TS),
            config=fake.config_document(),
            live=live.tolist(),
            flags=flags.tolist(),
            requests=list(rows.values()),
        )
        frames = int(seconds * fps)
        for frame in range(1, frames + 1):
            ts = START_TS + frame / fps
            for _ in range(4):
                fake.tick()
            revision = fake.revision
            if frame == frames // 2:
                fake.patch({"theta_f": 0.4}, False, None)
            for event in [e for e in fake.events if e.seq > sent_event]:
                sent_event = event.seq
                say(wire.EventMessage, ts, event=msgspec.structs.replace(event, ts=ts))
            changed = np.flatnonzero((pool.live != live) | (pool.flags != flags))
            now = {r.id: fake.row(r) for r in pool.requests.values()}
            say(
                wire.Delta,
                ts,
                block_ids=changed.tolist(),
                block_live=pool.live[changed].tolist(),
                block_flags=pool.flags[changed].tolist(),
                requests_changed=[r for k, r in now.items() if rows.get(k) != r],
                requests_removed=[k for k in rows if k not in now],
                status=status(ts),
                config=fake.config_document() if revision != fake.revision else None,
            )
            live, flags, rows = pool.live.copy(), pool.flags.copy(), now
    return fake
