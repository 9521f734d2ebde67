"""Writes a recording line by line, so that written lines survive a crash of the writer.

A line reaches the operating system at once in a plain file, and within FLUSH_S in a compressed one.
A key frame may begin a gzip member of its own, so that a reader can start there.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import Self

import msgspec

from vtoken import __version__, wire
from vtoken.recording.errors import RecordingError, RecordingExistsError

FLUSH_S = 1.0
FLIGHT_RECORDER = "flight recorder"  # `source` of its recordings; else the server's URL


class RecordingWriter:
    """A new recording at `path`, compressed if the name ends in `.gz`.

    Only its owner may read it (mode 0600) if it is `private`.
    """

    def __init__(self, path: Path, *, source: str, private: bool = False) -> None:
        """Creates the file and writes the header; raises RecordingError."""
        self._source = source
        self._mode = 0o600 if private else 0o666  # less the umask
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

    def write_audit(self, entry: wire.AuditEntry) -> None:
        self.write(msgspec.json.encode(wire.AuditLine(entry=entry)))

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
