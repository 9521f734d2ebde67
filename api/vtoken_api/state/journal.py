"""The journal of one server: its streams and its audit entries, appended in one order.

It is kept in two forms, both in the state directory. The *audit log* is a filter: entries alone,
for as long as two files hold them. A *flight recording* is a window on one engine: messages and
entries of the last day, in segments.

1. The event loop never waits for the disk: one thread writes everything, in order. Of one write,
   entries follow the messages.
2. A disk error does not stop the server. Entries stay in memory until they can be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vtoken import wire
from vtoken.base.documents import Decoder
from vtoken.recording import RecordingError
from vtoken_api.log import logger
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.segments import Segment, Segments, SegmentWriter
from vtoken_api.state.statedir import StateDir

SETTLE_S = 1.0  # the longest that a call waits for its entry to reach the disk
DISK_TIMEOUT_S = 10.0
WRITE_S = 1.0  # the most that a killed process loses
WRITE_BYTES = 256 * 1024
SEGMENT_S = 60.0
MAX_WAITING = 100  # entries that wait for the next write of a segment

T = TypeVar("T")

_messages: Decoder[wire.StreamMessage] = Decoder(wire.StreamMessage)


class Journal:
    """The audit log of a server, and the flight recording of each of its `engines`."""

    def __init__(self, state_dir: StateDir, engines: Sequence[int] = (0,)) -> None:
        self.audit = AuditLog(state_dir)
        self._state_dir = state_dir
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vtoken-journal")
        self._newest: Future[None] | None = None  # entry
        self.flights = {engine: Flight(state_dir.path, engine, self) for engine in engines}

    async def close(self) -> None:
        """Write what can be written and stop the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    def enter(self, entry: wire.AuditEntry) -> None:
        """Append an entry and log it. Does not wait."""
        for engine, flight in self.flights.items():
            if entry.engine in (None, engine):
                flight.entries.append(entry)
        self._newest = self._thread.submit(self.audit.append, entry)
        if not entry.dry_run:
            what = (entry.action, entry.actor, entry.changes, entry.revision)
            logger.info("vtoken: %s by %s: %s (revision %d)", *what)

    async def acquire(self) -> None:
        """Own the state directory; raises OSError."""
        await self.on_disk(self._state_dir.acquire)

    async def settle(self) -> None:
        """Wait, at most SETTLE_S, until the newest entry is written or has failed."""
        if self._newest is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await asyncio.shield(asyncio.wrap_future(self._newest))

    async def probe(self) -> None:
        """Check whether the disk accepts entries, and write the waiting ones."""
        await self._in_thread(self.audit.write)

    async def entries(self, limit: int) -> wire.AuditPage:
        """The newest `limit` entries, oldest first; unwritten ones are last."""
        return await self._in_thread(lambda: self.audit.page(limit))

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; raises TimeoutError if the disk hangs."""
        async with asyncio.timeout(DISK_TIMEOUT_S):
            return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(work))


class Flight:
    """The flight recording of one engine, written between `begin` and `end`.

    `entries`: of the audit log, that follow the messages of the next write. `problem`: why the
    recording stopped at `stopped_ts`; empty while it has not. `num_faults`: failed writes.
    """

    def __init__(self, folder: Path, engine: int, journal: Journal) -> None:
        self.segments = Segments(folder / (f"flight-{engine}" if engine else "flight"))
        self.entries: deque[wire.AuditEntry] = deque(maxlen=MAX_WAITING)
        self.recording = False  # by this process, now
        self.problem = ""
        self.stopped_ts = 0.0
        self.num_faults = 0
        self._journal = journal
        self._writer: SegmentWriter | None = None
        self._waiting: list[bytes] = []  # messages that are not written yet
        self._num_bytes = 0  # of them
        self._written_at = 0.0

    async def begin(self) -> None:
        """Open a segment; raises OSError, RecordingError."""

        def begin() -> None:
            self._writer = SegmentWriter(self.segments, SEGMENT_S)

        await self._journal.on_disk(begin)
        if self.problem:
            logger.info("vtoken: the flight recorder is recording again")
        self.recording, self.problem = True, ""

    async def take(self, message: bytes) -> None:
        """Append a message of the stream; waits for the disk once in WRITE_S.

        Raises OSError, RecordingError, and TimeoutError if the disk hangs.
        """
        self._waiting.append(message)
        self._num_bytes += len(message)
        now = time.monotonic()
        if self._num_bytes >= WRITE_BYTES or now - self._written_at >= WRITE_S:
            self._written_at = now
            await self.flush()

    async def flush(self) -> None:
        """Write what waits, if a segment is open; raises as `take` does."""
        messages, self._waiting, self._num_bytes = self._waiting, [], 0
        await self._journal.on_disk(lambda: self._write(messages))

    async def end(self) -> None:
        """Write what waits and complete the open segment, if there is one; raises as `take`."""
        self.recording = False
        try:
            await self.flush()
        finally:
            await self._journal.on_disk(self._complete)

    def stop(self, problem: str, *, fault: bool) -> None:
        """Note why nothing is recorded; `fault`: the disk is to blame."""
        if not self.problem:  # later ones, often the same with another file name, are no news
            self.stopped_ts = time.time()
            logger.warning("vtoken: the flight recorder stopped: %s", problem)
        self.problem = problem
        self.num_faults += fault

    def _write(self, messages: Sequence[bytes]) -> None:
        """Write so that other processes can read it. An error ends the segment."""
        writer = self._writer
        if writer is None:
            return
        try:
            for message in messages:
                writer.take(message, _messages.decode(message))
            while self.entries:
                writer.audit([self.entries.popleft()])
            writer.flush()
        except (OSError, RecordingError):
            self._writer = None
            writer.discard()
            raise

    def _complete(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    async def recent(self, seconds: float) -> list[Segment]:
        """The segments that cover the last `seconds`; raises OSError."""
        with contextlib.suppress(RecordingError, TimeoutError):
            await self.flush()
        return await asyncio.to_thread(self.segments.since, time.time() - seconds)
