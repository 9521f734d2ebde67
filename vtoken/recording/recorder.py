"""Records one stream: its messages in order of arrival, key frames, and the audit log."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from vtoken import wire
from vtoken.recording.writer import RecordingWriter
from vtoken.wire.reducer import ResyncNeeded, StreamState, apply
from vtoken.wire.views import Change

KEYFRAME_S = 10.0
AUDITED: frozenset[wire.EventKind] = frozenset({"config", "operation"})


class Recorder:
    """Writes every message passed to `take`, and a key frame at the latest every `keyframe_s`
    seconds, or `keyframe_bytes` of its file.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        *,
        keyframe_s: float = KEYFRAME_S,
        keyframe_bytes: float = math.inf,
    ) -> None:
        self.num_messages = 0
        self._writer = writer
        self._keyframe_s = keyframe_s
        self._keyframe_bytes = keyframe_bytes
        self._keyframe_ts = 0.0  # on the server's clock
        self._keyframe_at = 0  # bytes of the file before it
        self._state = StreamState()  # of the messages, without events; empty while it is unknown
        self._encoder = msgspec.json.Encoder()
        self._audited: set[tuple[float, str, str, int]] = set()

    def take(self, text: bytes, message: wire.StreamMessage) -> None:
        """Write one `message`, whose JSON is `text`; raises RecordingError.

        While the state is unknown, messages are written and key frames are not.
        """
        if isinstance(message, wire.Hello):
            self._writer.begin_member()
        self._writer.write(text)
        self.num_messages += 1
        try:
            # A key frame contains no events, so none are stored.
            self._state = replace(apply(self._state, message), events=())
        except ResyncNeeded:
            self._state = StreamState()
        if isinstance(message, wire.Hello | wire.Snapshot):
            self._keyframe_ts, self._keyframe_at = message.ts, self._writer.num_bytes
        elif self._needs_keyframe(message.ts):
            self._write_keyframe()
            self._keyframe_ts, self._keyframe_at = message.ts, self._writer.num_bytes

    def audit(self, entries: Iterable[wire.AuditEntry]) -> None:
        """Write the `entries` that were not written before."""
        seen = {(e.ts, e.actor, e.action, e.revision): e for e in entries}
        for key, entry in seen.items():
            if key not in self._audited:
                self._writer.write_audit(entry)
        if seen:
            self._audited = set(seen)

    def _needs_keyframe(self, ts: float) -> bool:
        num_bytes = self._writer.num_bytes - self._keyframe_at
        late = abs(ts - self._keyframe_ts) >= self._keyframe_s  # also after a jump back
        return late or num_bytes >= self._keyframe_bytes

    def _write_keyframe(self) -> None:
        messages = keyframe(self._state)
        if messages is not None:
            self._writer.begin_member()
            for message in messages:
                self._writer.write(self._encoder.encode(message))


def is_audited(message: wire.StreamMessage) -> bool:
    """Whether the audit log has probably grown since the previous message."""
    return isinstance(message, wire.EventMessage) and message.event.kind in AUDITED


def keyframe(state: StreamState) -> tuple[wire.Hello, wire.Snapshot] | None:
    """The `hello` and `snapshot` that replace all messages so far; None before a snapshot.

    They have the `seq` of the last two messages, so that the next message of the stream continues
    them.
    """
    if state.hello is None or state.config is None or not state.synced:
        return None
    hello = msgspec.structs.replace(
        state.hello, seq=state.seq - 1, step=state.step, ts=state.ts, resumed=False
    )
    snapshot = wire.Snapshot(
        epoch=state.epoch,
        seq=state.seq,
        step=state.step,
        ts=state.ts,
        **Change.whole(state.view).as_snapshot(packed=False),
    )
    if "requests" not in hello.topics:
        snapshot.requests = None
    return hello, snapshot
