"""`vtoken record`: writes the stream to a file, for `vtoken console --replay` and for scripts.

Exits with 0 when interrupted or after the duration, with 1 when the stream ends.
"""

from __future__ import annotations

import io
import itertools
import math
import time
from pathlib import Path

import msgspec

from vtoken.base.documents import Decoder
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.remote import Remote
from vtoken.client import Client
from vtoken.recording import (
    RecordingError,
    RecordingExistsError,
    RecordingReader,
    RecordingWriter,
)
from vtoken.recording.writer import FLIGHT_RECORDER, is_audited

AUDIT_LIMIT = 1000


class _Line(msgspec.Struct):
    """Any line of a recording."""

    type: str


_any_line: Decoder[_Line] = Decoder(_Line)


class Recorded(msgspec.Struct):
    """What `record` has written."""

    file: str
    messages: int


def record(
    remote: Remote, file: str, fps: float, duration: float | None, last: float | None
) -> None:
    """Record the stream and the audit log from now on, or download the recent past."""
    if last is not None and duration is not None:
        raise UsageError("--duration and --last exclude each other", "--last downloads the past")
    path = Path(file)
    try:
        if last is not None:
            num_messages = _download(remote.client, path, math.ceil(last))
        else:
            num_messages = _record_stream(remote.client, path, fps, duration)
    except RecordingExistsError as error:
        raise UsageError(str(error)) from error
    except RecordingError as error:
        raise CommandError(str(error)) from error
    remote.out.show(Recorded(file, num_messages), _lines)


def _lines(recorded: Recorded) -> list[str]:
    replay = f"replay with: vtoken console --replay {recorded.file}"
    return [f"{recorded.messages:,} messages in {recorded.file}; {replay}"]


def _download(client: Client, path: Path, seconds: int) -> int:
    """Write the flight recorder's last `seconds` to a new file; returns the message count."""
    if path.exists():
        raise RecordingExistsError(path)
    content = io.BytesIO(client.recording(seconds))
    num_messages = 0
    with (
        RecordingReader(path, content) as reader,
        RecordingWriter(path, source=FLIGHT_RECORDER) as writer,
    ):
        for place, line in iter(reader.raw, None):
            known = reader.parse(_any_line, place, line)
            if known is None or known.type == "recording":  # damaged, or the header of a segment
                continue
            if known.type == "hello":
                writer.begin_member()
            writer.write(line)
            num_messages += known.type != "audit"
        damage = reader.damage
    if damage is not None:
        raise CommandError(f"{damage}; the other {num_messages:,} messages are in {path}")
    return num_messages


def _record_stream(client: Client, path: Path, fps: float, duration: float | None) -> int:
    """Write the stream from now on; returns the message count."""
    deadline = None if duration is None else time.monotonic() + duration
    before = client.audit(AUDIT_LIMIT).entries  # an unreachable server leaves no file
    with client.stream(fps=fps, format="json") as stream:
        first = next(stream)
        with RecordingWriter(path, source=client.server.url) as writer:
            writer.audit(before)
            try:
                for message in itertools.chain([first], stream):
                    writer.take(str(stream.raw).encode(), message)
                    if is_audited(message):
                        writer.audit(client.audit(AUDIT_LIMIT).entries)
                    if deadline is not None and time.monotonic() >= deadline:
                        break
            except KeyboardInterrupt:
                pass
            return writer.num_messages
