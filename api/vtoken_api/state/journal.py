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

import msgspec

from vtoken import wire
from vtoken.recording import RecordingError
from vtoken_api.log import logger
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.segments import Segment, Segments
from vtoken_api.state.statedir import StateDir

SETTLE_S = 1.0  # the longest that a call waits for its entry to reach the disk
DISK_TIMEOUT_S = 10.0
WRITE_S = 1.0  # the most that a killed process loses
WRITE_BYTES = 256 * 1024
MAX_WAITING = 100  # entries that wait for the next write of a segment

T = TypeVar("T")


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
        line = msgspec.json.encode(wire.AuditLine(entry=entry))
        for engine, flight in self.flights.items():
            if entry.engine in (None, engine):
                flight.note(line)
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

    async def newest_event(self, epoch: str) -> int:
        """The highest `event_seq` of an epoch among the entries, 0 if none."""
        return await self._in_thread(lambda: self.audit.newest_event(epoch))

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; raises TimeoutError if the disk hangs."""
        async with asyncio.timeout(DISK_TIMEOUT_S):
            return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(work))


class Flight:
    """The flight recording of one engine; a segment is open between `begin` and `end`."""

    def __init__(self, folder: Path, engine: int, journal: Journal) -> None:
        self.segments = Segments(folder / (f"flight-{engine}" if engine else "flight"))
        self._engine = engine
        self._journal = journal
        self._messages: list[bytes] = []  # not in the segment yet
        self._num_bytes = 0  # of them
        self._entries: deque[bytes] = deque(maxlen=MAX_WAITING)  # that follow them
        self._written_at = 0.0

    def note(self, entry: bytes) -> None:
        """Append an audit entry, with the next write."""
        self._entries.append(entry)

    async def take_up(self) -> tuple[str, int] | None:
        """Continue the recording of a process that has ended; the newest event that it wrote.

        Audit entries that it did not write come first in the next segment. Raises OSError.
        """
        tail = await self._journal.on_disk(self.segments.tail)
        page = await self._journal.entries(MAX_WAITING)
        missing = []
        for entry in page.entries:
            line = msgspec.json.encode(wire.AuditLine(entry=entry))
            concerns = entry.engine in (None, self._engine) and entry.ts >= tail.start_ts > 0
            if concerns and line not in tail.audit and line not in self._entries:
                missing.append(line)
        # Before those that were entered since this process took over.
        self._entries = deque([*missing, *self._entries], maxlen=MAX_WAITING)
        return tail.resume

    async def begin(self) -> None:
        """Open a segment, whose first messages are a key frame; raises OSError, RecordingError."""
        await self._journal.on_disk(self.segments.begin)

    async def append(self, message: bytes) -> bool:
        """Append a message of the stream to the open segment; waits for the disk once in WRITE_S.

        Returns whether the next segment should begin. Raises RecordingError, and TimeoutError if
        the disk hangs.
        """
        self._messages.append(message)
        self._num_bytes += len(message)
        now = time.monotonic()
        if self._num_bytes >= WRITE_BYTES or now - self._written_at >= WRITE_S:
            self._written_at = now
            await self.flush()
            return self.segments.is_full
        return False

    async def flush(self) -> None:
        """Write what waits into the open segment, if there is one; raises as `append` does."""
        if self.segments.writing:
            lines = [*self._messages, *self._entries]
            self._messages, self._num_bytes = [], 0
            self._entries.clear()
            await self._journal.on_disk(lambda: self.segments.append(lines))

    async def end(self) -> None:
        """Complete the open segment, if there is one; raises as `append` does."""
        await self._journal.on_disk(self.segments.end)

    async def recent(self, seconds: float) -> list[Segment]:
        """The segments that cover the last `seconds`; raises OSError."""
        with contextlib.suppress(RecordingError, TimeoutError):
            await self.flush()
        return await asyncio.to_thread(self.segments.since, time.time() - seconds)
