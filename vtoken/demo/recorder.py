"""Reads the server's stream in a thread: records it, and keeps the data of the report.

1. A gap in `seq` ends the stream and is counted in `gaps`.
2. A lost connection is an error that `check` raises; the recorder never reconnects.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

from vtoken import recording as recordings
from vtoken import wire
from vtoken.client import Client, ProblemError, StreamGap
from vtoken.demo.server import DemoError

FPS = 5
JOIN_S = 10.0
REVISION_S = 60.0  # a busy machine takes a while to show the first


class Recorder:
    """The stream of `client`'s server, recorded into `path` inside the `with` block."""

    def __init__(self, client: Client, path: Path) -> None:
        self.gaps = 0
        self.messages = 0
        self.dropped_events = 0
        self.samples: list[wire.Status] = []
        self._source = client.server.url
        self._stream = client.stream(fps=FPS, format="json")
        self._path = path
        self._changed = threading.Condition()
        self._config: wire.ConfigDocument | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for_revision(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._thread.join(JOIN_S)

    def check(self) -> None:
        """Raises DemoError if the stream broke."""
        if self._error is not None:
            raise DemoError(f"the stream broke: {self._error}")

    def wait_for_revision(self, revision: int) -> wire.ConfigDocument:
        """Wait until `revision` or a later one is effective; returns the configuration."""
        deadline = time.monotonic() + REVISION_S
        with self._changed:
            while self._config is None or self._config.effective_revision < revision:
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    seen = "none" if self._config is None else self._config.effective_revision
                    raise DemoError(
                        f"the stream shows revision {seen}, not {revision}, in {REVISION_S:.0f} s"
                    )
                self._changed.wait(left)
            return self._config

    def _run(self) -> None:
        try:
            with recordings.RecordingWriter(self._path, source=self._source) as writer:
                recorder = recordings.Recorder(writer)
                for message in self._stream:
                    recorder.take(str(self._stream.raw).encode(), message)
                    self._take(message)
        except (ProblemError, recordings.RecordingError) as error:
            with self._changed:
                self.gaps += isinstance(error, StreamGap)
                self._error = f"{type(error).__name__}: {error}"
                self._changed.notify_all()

    def _take(self, message: wire.StreamMessage) -> None:
        self.messages += 1
        if isinstance(message, wire.Dropped):
            self.dropped_events += message.n
        elif isinstance(message, wire.Snapshot | wire.Delta):
            if message.status is not None:
                self.samples.append(message.status)
            if message.config is not None:
                with self._changed:
                    self._config = message.config
                    self._changed.notify_all()
