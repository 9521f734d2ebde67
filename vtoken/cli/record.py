"""`vtoken record`: writes the stream to a file, for `vtoken console --replay` and for scripts.

Exits with 0 when interrupted or after the duration, with 1 when the stream ends.
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.printing import print_json, print_text
from vtoken.cli.record_text import TextReader
from vtoken.client import Client
from vtoken.recording import (
    Recorder,
    RecordingError,
    RecordingExistsError,
    RecordingReader,
    RecordingWriter,
)
from vtoken.recording.recorder import is_audited

AUDIT_LIMIT = 1000
NOT_MESSAGES = (b'{"type":"recording"', b'{"type":"audit"')


class _Line(msgspec.Struct):
    """Any line of a recording."""

    type: str


_any_line: Decoder[_Line] = Decoder(_Line)


def record(arguments: Namespace, client: Client) -> int:
    """Record the stream and the audit log from now on, or download the recent past."""
    path = Path(arguments.file)
    texts: TextReader | None = None
    if arguments.last is not None and arguments.with_text:
        raise UsageError(
            "--with-text and --last exclude each other: the flight recorder never stores text",
            "to record from now on: vtoken record FILE --with-text --duration 5m",
        )
    try:
        if arguments.last is not None:
            num_messages = _download(client, path, math.ceil(arguments.last))
        else:
            num_messages, texts = _record_stream(arguments, client, path)
    except RecordingExistsError as error:
        raise UsageError(str(error)) from error
    except RecordingError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        text = {} if texts is None else {"text": _summary(texts)}
        print_json({"file": str(path), "messages": num_messages, **text})
        return 0
    print_text(f"{num_messages:,} messages in {path}; replay with: vtoken console --replay {path}")
    if texts is not None:
        print_text(f"text: {texts.num_requests:,} requests, {texts.num_texts:,} lines; mode 0600")
        for line in texts.skipped():
            print_text(line)
    return 0


def _summary(texts: TextReader) -> dict[str, Any]:
    return {
        "requests": texts.num_requests,
        "lines": texts.num_texts,
        "unread_requests": texts.num_unread,
        "failed_calls": texts.num_refused,
        "skipped": texts.skipped(),
    }


def _download(client: Client, path: Path, seconds: int) -> int:
    """Write the flight recorder's last `seconds` to a new file; returns the message count."""
    if path.exists():
        raise RecordingExistsError(path)
    packed = client.recording(seconds)
    lines, damage = _intact_lines(path, packed)
    text = b"".join(lines)
    if path.suffix == ".gz":
        text = packed if damage is None else gzip.compress(text)
    try:
        file = path.open("xb")
        try:
            with file:
                file.write(text)
        except OSError:
            path.unlink(missing_ok=True)  # it holds a part
            raise
    except FileExistsError as error:
        raise RecordingExistsError(path) from error
    except OSError as error:
        raise RecordingError(path, f"cannot be written: {error.strerror or error}") from error
    num_messages = sum(not line.startswith(NOT_MESSAGES) for line in lines)
    if damage is not None:
        raise CommandError(f"{damage}; the other {num_messages:,} messages are in {path}")
    return num_messages


def _intact_lines(path: Path, packed: bytes) -> tuple[list[bytes], RecordingError | None]:
    """The lines of a download that can be read, and the first damage. Raises RecordingError if it
    is not a recording.
    """
    lines = []
    with RecordingReader(path, io.BytesIO(packed)) as reader:
        for place, line in iter(reader.raw, None):
            if reader.parse(_any_line, place, line) is not None:
                lines.append(line + b"\n")
        return lines, reader.damage


def _record_stream(
    arguments: Namespace, client: Client, path: Path
) -> tuple[int, TextReader | None]:
    """The number of messages written, and the reader of text if it was requested."""
    deadline = None if arguments.duration is None else time.monotonic() + arguments.duration
    before = client.audit(AUDIT_LIMIT).entries  # an unreachable server leaves no file
    with client.stream(fps=arguments.fps, format="json") as stream:
        first = next(stream)
        if arguments.with_text:
            _check_text(first)
        with RecordingWriter(
            path, source=client.server.url, holds_text=arguments.with_text
        ) as writer:
            recorder = Recorder(writer)
            recorder.audit(before)
            texts = TextReader(client, recorder.text) if arguments.with_text else None
            try:
                for message in itertools.chain([first], stream):
                    recorder.take(str(stream.raw).encode(), message)
                    if is_audited(message):
                        recorder.audit(client.audit(AUDIT_LIMIT).entries)
                    if texts is not None:
                        texts.turn(recorder.state)
                    if deadline is not None and time.monotonic() >= deadline:
                        break
            except KeyboardInterrupt:
                pass
            finally:
                if texts is not None:
                    texts.close()
            return recorder.num_messages, texts


def _check_text(first: wire.StreamMessage) -> None:
    """Raises CommandError if the server does not show text to this client."""
    if not isinstance(first, wire.Hello) or not first.can_read_text:
        raise CommandError(
            "the server shows no text to this client; nothing was recorded",
            "the server must be started with --vtoken-show-text\n"
            "and, if it has tokens, you need the control token",
        )
