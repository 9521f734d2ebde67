"""The flight recorder: always on, it keeps a bounded recording of the recent past on disk.

It is a passive client of the hub. While no other client wants state, it polls the engine once a
second, less often while the engine is idle.

1. Only the process that owns the state directory records.
2. The segments on disk have a total bound; the oldest segment is deleted first.
3. A disk error stops the recording, not the server: `problem` has the reason, `num_faults` the
   count, and recording resumes when the disk accepts writes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vtoken import wire
from vtoken.recording import RecordingError, RecordingWriter
from vtoken.recording.writer import FLIGHT_RECORDER
from vtoken_api.fanout.frame import TOPICS
from vtoken_api.fanout.hub import Hub
from vtoken_api.fanout.session import Session, StreamQuery
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.segments import Segments
from vtoken_api.state.statedir import StateDir

MAX_BYTES = 64 * 1024 * 1024
SEGMENT_BYTES = 1024 * 1024
SEGMENT_S = 60.0
STATE_S = 1.0  # between two states while the engine takes steps
IDLE_STATE_S = 2.0
WRITE_S = 1.0  # the most that a killed process loses
WRITE_BYTES = 256 * 1024
DISK_TIMEOUT_S = 10.0
RETRY_S = 5.0
MAX_AUDITED = 100  # entries that wait for the recording to resume

T = TypeVar("T")


class SegmentFull(Exception):  # noqa: N818 - the regular end of a segment
    """The segment is complete; the next one begins."""


class FlightRecorder:
    """`start` once, inside the event loop."""

    def __init__(self, hub: Hub, state_dir: StateDir) -> None:
        self.segments = Segments(state_dir.path / "flight", max_bytes=MAX_BYTES)
        self.recording = False  # by this process, now
        self.problem = ""  # why it stopped; empty while it does not
        self.stopped_ts = 0.0  # when it stopped
        self.num_faults = 0  # failed writes
        self._hub = hub
        self._state_dir = state_dir
        self._segment_bytes = SEGMENT_BYTES
        self._retry_s = RETRY_S
        self._writer: RecordingWriter | None = None
        self._ends_at = 0.0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written_at = 0.0
        self._audited: deque[wire.AuditEntry] = deque(maxlen=MAX_AUDITED)  # not written yet
        self._resume: tuple[str, int] | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="vtoken-flight")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start recording in the background."""
        self._task = asyncio.create_task(self._run(), name="vtoken-flight")

    async def close(self) -> None:
        """Stop; the open segment is finished."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._finish(self._on_disk(self._end))  # the task may have been cancelled in it
        self._disk.shutdown(wait=False)

    def audit(self, entry: wire.AuditEntry) -> None:
        """Record `entry` with the next messages. Does not wait."""
        self._audited.append(entry)

    async def flush(self) -> None:
        """Write the pending messages to disk, if this process records."""
        if self.recording:
            with contextlib.suppress(RecordingError, TimeoutError):
                await self._write()

    # ------------------------------------------------------------ inside

    async def _run(self) -> None:
        fresh = asyncio.create_task(self._keep_fresh(), name="vtoken-flight-state")
        try:
            while True:
                try:
                    await self._on_disk(self._state_dir.acquire)
                    while True:
                        await self._record_segment()
                except ProblemError as error:
                    self._stop(f"the engine does not answer: {error.problem.detail}", fault=False)
                except (RecordingError, OSError) as error:  # a TimeoutError: a disk that hangs
                    self._stop(str(error) or "the disk does not answer", fault=True)
                except Exception as error:
                    logger.exception("vtoken: the flight recorder failed; restarting it")
                    self._stop(f"internal error: {error}", fault=True)
                await asyncio.sleep(self._retry_s)
        finally:
            fresh.cancel()

    def _stop(self, problem: str, *, fault: bool) -> None:
        if not self.problem:  # later ones, often the same with another file name, are no news
            self.stopped_ts = time.time()
            logger.warning("vtoken: the flight recorder stopped: %s", problem)
        self.problem = problem
        self.num_faults += fault

    async def _keep_fresh(self) -> None:
        pause = STATE_S
        while True:
            await asyncio.sleep(pause)
            if self.recording:
                before = self._hub.view
                with contextlib.suppress(ProblemError):
                    view = await self._hub.current()
                    idle = before is not None and before.step == view.step
                    pause = IDLE_STATE_S if idle else STATE_S

    async def _record_segment(self) -> None:
        query = StreamQuery(frozenset(TOPICS), fps=1.0 / STATE_S, packed=False, resume=self._resume)
        session = Session(self._hub, query, self._take, passive=True)
        self._hub.join(session)
        try:
            await session.prepare()
            await self._on_disk(self._begin)
            if self.problem:
                logger.info("vtoken: the flight recorder is recording again")
            self.recording, self.problem = True, ""
            with contextlib.suppress(SegmentFull):
                await session.run(read_only_reason="this is a recording")
        finally:
            self.recording = False
            self._hub.leave(session)
            self._resume = session.resume_from or self._resume
            await self._finish(self._write())
            await self._finish(self._on_disk(self._end))

    async def _finish(self, work: Awaitable[None]) -> None:
        """Await the rest of a segment's work; reports errors instead of raising, also on exit."""
        try:
            await work
        except (RecordingError, OSError) as error:
            self._stop(str(error) or "the disk does not answer", fault=True)

    async def _take(self, message: bytes) -> None:
        """Buffer a message of the session; raises SegmentFull."""
        loop = asyncio.get_running_loop()
        self._pending.append(message)
        self._pending_bytes += len(message)
        if self._pending_bytes >= WRITE_BYTES or loop.time() - self._written_at >= WRITE_S:
            self._written_at = loop.time()
            await self._write()
            writer = self._writer
            if loop.time() >= self._ends_at or (
                writer is not None and writer.num_bytes >= self._segment_bytes
            ):
                raise SegmentFull

    async def _write(self) -> None:
        lines, self._pending, self._pending_bytes = self._pending, [], 0
        await self._on_disk(lambda: self._put(lines))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Run `work` in the disk thread; raises TimeoutError if the disk hangs."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DISK_TIMEOUT_S):
            return await loop.run_in_executor(self._disk, work)

    # ------------------------------------------------------------ in the disk thread

    def _begin(self) -> None:
        self.segments.prune(self._segment_bytes)
        path = self.segments.new_path()
        self._writer = RecordingWriter(path, source=FLIGHT_RECORDER, private=True)
        self._ends_at = time.monotonic() + SEGMENT_S

    def _put(self, lines: list[bytes]) -> None:
        if self._writer is not None:
            for line in lines:
                self._writer.write(line)
            while self._audited:
                self._writer.write_audit(self._audited.popleft())
            self._writer.flush()

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self.segments.finish(writer.path)
