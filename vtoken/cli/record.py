"""`vtoken record`: the stream into a file, for `vtoken console --replay` and for scripts.

Knows the link and the recorder. Ends with the stream (1), or when interrupted or over (0).
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from vtoken import wire
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.link import Link
from vtoken.cli.show import say, say_json
from vtoken.recording import Recorder, RecordingError, RecordingExistsError, RecordingWriter
from vtoken.recording.recorder import is_audited

ALL_TOPICS = "blocks,requests,events,metrics"
AUDIT_LIMIT = "1000"


def record(arguments: Namespace) -> int:
    """Everything the stream says from now on, and who changed what."""
    path = Path(arguments.file)
    try:
        num_messages = _record_stream(arguments, path)
    except RecordingExistsError as error:
        raise UsageError(str(error)) from error
    except RecordingError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        say_json({"file": str(path), "messages": num_messages})
    else:
        say(f"{num_messages:,} messages in {path}; look at them: vtoken console --replay {path}")
    return 0


def _record_stream(arguments: Namespace, path: Path) -> int:
    deadline = None if arguments.duration is None else time.monotonic() + arguments.duration
    link = Link(arguments)
    before = _audit(link)  # an unreachable server leaves no file
    messages = link.stream(topics=ALL_TOPICS, fps=f"{arguments.fps:g}", format="json")
    with RecordingWriter(path, source=link.url) as writer:
        recorder = Recorder(writer)
        recorder.audit(before)
        try:
            for text, message in messages:
                recorder.take(text.encode(), message)
                if is_audited(message):
                    recorder.audit(_audit(link))
                if deadline is not None and time.monotonic() >= deadline:
                    break
        except KeyboardInterrupt:
            pass
        except CommandError:
            if not recorder.num_messages:
                path.unlink(missing_ok=True)
            raise
        return recorder.num_messages


def _audit(link: Link) -> list[wire.AuditEntry]:
    return link.call(wire.AuditPage, "GET", "/audit", params={"limit": AUDIT_LIMIT}).entries
