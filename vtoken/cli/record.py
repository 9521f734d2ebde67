"""`vtoken record`: the stream into a file, for `vtoken console --replay` and for scripts.

Knows the client and the recorder. Ends with the stream (1), or when interrupted or over (0).
"""

from __future__ import annotations

import gzip
import math
import time
from argparse import Namespace
from pathlib import Path

from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.text import say, say_json
from vtoken.client import Client, ProblemError
from vtoken.recording import Recorder, RecordingError, RecordingExistsError, RecordingWriter
from vtoken.recording.recorder import is_audited

AUDIT_LIMIT = 1000
NOT_MESSAGES = (b'{"type":"recording"', b'{"type":"audit"')


def record(arguments: Namespace, client: Client) -> int:
    """Everything the stream says from now on, or what happened just now, and who changed what."""
    path = Path(arguments.file)
    try:
        if arguments.last is not None:
            num_messages = _download(client, path, math.ceil(arguments.last))
        else:
            num_messages = _record_stream(arguments, client, path)
    except RecordingExistsError as error:
        raise UsageError(str(error)) from error
    except RecordingError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        say_json({"file": str(path), "messages": num_messages})
    else:
        say(f"{num_messages:,} messages in {path}; look at them: vtoken console --replay {path}")
    return 0


def _download(client: Client, path: Path, seconds: int) -> int:
    """The flight recorder's last `seconds`, into a new file."""
    if path.exists():
        raise RecordingExistsError(path)
    packed = client.recording(seconds)
    lines = gzip.decompress(packed)
    try:
        with path.open("xb") as file:
            file.write(packed if path.suffix == ".gz" else lines)
    except FileExistsError as error:
        raise RecordingExistsError(path) from error
    except OSError as error:
        raise RecordingError(path, f"cannot be written: {error.strerror or error}") from error
    return sum(not line.startswith(NOT_MESSAGES) for line in lines.splitlines())


def _record_stream(arguments: Namespace, client: Client, path: Path) -> int:
    deadline = None if arguments.duration is None else time.monotonic() + arguments.duration
    before = client.audit(AUDIT_LIMIT).entries  # an unreachable server leaves no file
    with (
        client.stream(fps=arguments.fps, format="json") as stream,
        RecordingWriter(path, source=client.server.url) as writer,
    ):
        recorder = Recorder(writer)
        recorder.audit(before)
        try:
            for message in stream:
                recorder.take(str(stream.raw).encode(), message)
                if is_audited(message):
                    recorder.audit(client.audit(AUDIT_LIMIT).entries)
                if deadline is not None and time.monotonic() >= deadline:
                    break
        except KeyboardInterrupt:
            pass
        except ProblemError:
            if not recorder.num_messages:
                path.unlink(missing_ok=True)
            raise
        return recorder.num_messages
