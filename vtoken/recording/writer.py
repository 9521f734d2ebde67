"""Writes a recording line by line, so that written lines survive a crash of the writer.

A line reaches the operating system at once in a plain file, and within FLUSH_S in a compressed one.
A key frame begins a gzip member of its own, so that a reader can start there.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from vtoken import __version__, wire
from vtoken.recording.errors import RecordingError, RecordingExistsError
from vtoken.wire.engine_state import Difference
from vtoken.wire.reducer import ResyncNeeded, StreamState, apply

FLUSH_S = 1.0
KEYFRAME_S = 10.0
AUDITED: frozenset[wire.EventKind] = frozenset({"config", "operation"})
FLIGHT_RECORDER = "flight recorder"  # `source` of its recordings; else the server's URL


class RecordingWriter:
    """A new recording at `path`, compressed if the name ends in `.gz`.

    `take` adds a key frame at the latest every `keyframe_s` seconds, or `keyframe_bytes` of the
    file. Only its owner may read the file (mode 0600) if it is `private`.
    """

    def __init__(
        self,
        path: Path,
        *,
        source: str,
        private: bool = False,
        keyframe_s: float = KEYFRAME_S,
        keyframe_bytes: float = math.inf,
    ) -> None:
        """Creates the file and writes the header; raises RecordingError."""
        self.num_messages = 0  # that were passed to `take`
        self._source = source
        self._mode = 0o600 if private else 0o666  # less the umask
        self._keyframe_s = keyframe_s
        self._keyframe_bytes = keyframe_bytes
        self._keyframe_ts = 0.0  # on the server's clock
        self._keyframe_at = 0  # bytes of the file before it
        self._state = StreamState()  # of the messages, without events; empty while it is unknown
        self._audited: set[tuple[float, str, str, int]] = set()
        self._encoder = msgspec.json.Encoder()
        self._open(path)

    def _open(self, path: Path) -> None:
        """Create the file and write the header; raises RecordingError."""
        self.path = path
        self.num_lines = 0
        self.num_bytes = 0  # in the file
        self._flushed_at = time.monotonic()
        self._deflate: zlib._Compress | None = _deflate() if path.suffix == ".gz" else None
        try:
            new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        except FileExistsError as error:
            raise RecordingExistsError(path) from error
        except OSError as error:
            raise self._failed(error) from error
        self._file = open(new, "wb", buffering=0)  # noqa: SIM115 - `close` closes it
        header = wire.RecordingHeader(
            schema=wire.SCHEMA_VERSION,
            vtoken_version=__version__,
            created_ts=time.time(),
            source=self._source,
        )
        try:
            self.write(msgspec.json.encode(header))
            self.flush()
        except RecordingError:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, RecordingError):
            self.discard()
        else:
            self.close()

    @property
    def is_open(self) -> bool:
        return not self._file.closed

    # ------------------------------------------------------------ what is recorded

    def take(self, text: bytes, message: wire.StreamMessage) -> None:
        """Write one `message` of the stream, whose JSON is `text`; raises RecordingError.

        While the state is unknown, messages are written and key frames are not.
        """
        if isinstance(message, wire.Hello):
            self.begin_member()
        self.write(text)
        self.num_messages += 1
        try:
            # A key frame contains no events, so none are stored.
            self._state = replace(apply(self._state, message), events=())
        except ResyncNeeded:
            self._state = StreamState()
        is_keyframe = isinstance(message, wire.Hello | wire.Snapshot)
        if not is_keyframe and self._needs_keyframe(message.ts):
            self._write_keyframe()
            is_keyframe = True
        if is_keyframe:
            self._keyframe_ts, self._keyframe_at = message.ts, self.num_bytes

    def audit(self, entries: Iterable[wire.AuditEntry]) -> None:
        """Write the `entries` that the call before did not have."""
        seen = {(e.ts, e.actor, e.action, e.revision): e for e in entries}
        for key, entry in seen.items():
            if key not in self._audited:
                self.write(self._encoder.encode(wire.AuditLine(entry=entry)))
        if seen:
            self._audited = set(seen)

    def _needs_keyframe(self, ts: float) -> bool:
        late = abs(ts - self._keyframe_ts) >= self._keyframe_s  # also after a jump back
        return late or self.num_bytes - self._keyframe_at >= self._keyframe_bytes

    def _write_keyframe(self) -> None:
        messages = keyframe(self._state)
        if messages is not None:
            self.begin_member()
            for message in messages:
                self.write(self._encoder.encode(message))

    # ------------------------------------------------------------ lines

    def write(self, line: bytes) -> None:
        """Write one JSON document. After a RecordingError the lines before stay readable."""
        text = line + b"\n"
        if self._deflate is None:
            self._put(text)
        else:
            self._put(self._deflate.compress(text))
            if time.monotonic() - self._flushed_at >= FLUSH_S:
                self.flush()
        self.num_lines += 1

    def begin_member(self) -> None:
        """Begin a new gzip member, so that a reader can start at the next line."""
        if self._deflate is not None:
            self._put(self._deflate.flush(zlib.Z_FINISH))
            self._deflate = _deflate()

    def flush(self) -> None:
        """Make everything written so far readable by other processes."""
        if self._deflate is not None:
            self._put(self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Finish the file; raises RecordingError. Calling it again does nothing."""
        if self._file.closed:
            return
        try:
            if self._deflate is not None:
                self._put(self._deflate.flush(zlib.Z_FINISH))
        finally:
            self._file.close()

    def discard(self) -> None:
        """Close the file as it is, after an error."""
        self._file.close()

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = self._file.write(view)
                self.num_bytes += written
                view = view[written:]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RecordingError:
        reason = f"cannot be written: {error.strerror or error}"
        if self.num_lines:
            reason += f"; the first {self.num_lines:,} lines are readable"
        return RecordingError(self.path, reason)


def _deflate() -> zlib._Compress:
    return zlib.compressobj(wbits=31)


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
        **Difference.whole(state.engine).as_snapshot(packed=False),
    )
    if "requests" not in hello.topics:
        snapshot.requests = None
    return hello, snapshot
