"""A recording as a source: play, pause, step, seek.

A seek rebuilds the model from a key frame, together with the charts and the log of the time before
it, and shows the result once it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from pathlib import Path

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder
from vtoken.recording import Entry, Index, Place, RecordingError, RecordingReader, scan
from vtoken.sentences import clock
from vtoken.wire.reducer import MAX_EVENTS, ResyncNeeded
from vtoken_console.feed.connection import State
from vtoken_console.feed.data import MAX_AUDIT, FeedData
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.offline_client import OfflineClient
from vtoken_console.feed.playhead import Playhead, ReplayStatus, parse_moment

SAMPLE = Path(__file__).parents[1] / "sample.jsonl.gz"  # made by `python -m scripts.sample`
HISTORY_S = 900.0  # length of charts and log after a seek
FOLLOW_S = 0.5  # polling interval of a file that may still grow
YIELD_EVERY = 64


class _Past(msgspec.Struct):
    """The fields of a message before the key frame that charts and log need."""

    type: str
    epoch: str = ""
    event: wire.Event | None = None
    status: wire.Status | None = None
    entry: wire.AuditEntry | None = None


_pasts: Decoder[_Past] = Decoder(_Past)


class Replay:
    """Plays `path`. Raises RecordingError if it is not a recording."""

    def __init__(self, path: Path, *, moment: str | None = None) -> None:
        self.name = path.name
        self.feed = Feed(FeedData())
        self.rest = OfflineClient()
        self.index = Index()
        self.note = ""
        self._path = path
        self._reader = RecordingReader(path)
        self._playhead = Playhead()
        self._next: wire.StreamMessage | None = None
        self._clock_ts = 0.0  # ts of the last applied message; never decreases
        self._target_ts: float | None = None  # of a requested seek
        self._steps = 0
        self._at_end = False
        self._skipping = False  # to the next key frame, after a gap
        self._moment = moment  # None after the initial seek
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ controls

    @property
    def replay(self) -> ReplayStatus:
        index, playhead = self.index, self._playhead
        return ReplayStatus(
            name=self.name,
            ts=self._target_ts
            if self._target_ts is not None
            else min(self._now_ts(), index.last_ts),
            first_ts=index.first_ts,
            last_ts=index.last_ts,
            speed=playhead.speed,
            paused=playhead.paused,
            at_end=self._at_end,
            indexed=index.complete,
            marks=tuple((mark.ts, mark.kind, mark.text) for mark in index.marks),
            note=self.note or str(index.error or "") or index.truncated,
        )

    @property
    def ready(self) -> bool:
        return self.feed.ready and self._target_ts is None and self._moment is None

    def retry_now(self) -> None:
        """Does nothing: a file needs no reconnect."""

    def toggle_pause(self) -> None:
        if self._at_end and not self._playhead.paused:
            self.seek(self.index.first_ts)
            return
        self._playhead = self._playhead.with_paused(not self._playhead.paused, time.monotonic())
        self._changed.set()

    def faster(self, steps: int) -> None:
        self._playhead = self._playhead.faster(steps, time.monotonic())
        self._changed.set()

    def step(self) -> None:
        """Pauses, and applies one message."""
        self._playhead = self._playhead.with_paused(True, time.monotonic())
        self._steps += 1
        self._changed.set()

    def seek(self, ts: float) -> None:
        """Seeks to `ts`, clamped to the recording."""
        self.note = ""
        self._target_ts = max(self.index.first_ts, min(ts, self.index.last_ts))
        self._steps = 0
        self._changed.set()

    def seek_by(self, seconds: float) -> None:
        self.seek((self._now_ts() if self._target_ts is None else self._target_ts) + seconds)

    def seek_text(self, text: str) -> None:
        """Seeks to a typed moment; raises ValueError."""
        self.seek(parse_moment(text, self.index.first_ts, self.index.last_ts))

    def _now_ts(self) -> float:
        return self._playhead.ts(time.monotonic())

    # ------------------------------------------------------------ playing

    async def run(self) -> None:
        self.feed.set_connection(State.CONNECTING)
        scanning = asyncio.create_task(self._scan())
        try:
            while not self.index.keyframes:
                if self.index.complete:
                    reason = str(self.index.error or "it holds no snapshot to start from")
                    self.feed.set_connection(State.REFUSED, f"{self._path.name}: {reason}")
                    await asyncio.Event().wait()
                await asyncio.sleep(0.01)
            self.feed.set_connection(State.SYNCING)
            await self._begin(scanning)
            while True:
                await self._advance()
        finally:
            scanning.cancel()
            self._reader.close()
            self.feed.set_connection(State.CLOSED)

    async def _begin(self, scanning: asyncio.Task[None]) -> None:
        """Seeks to the start; with an initial moment, seeks there and pauses."""
        self.seek(self.index.keyframes[0].ts)
        if self._moment is not None:
            await asyncio.wait([scanning])
            try:
                self.seek_text(self._moment)
            except ValueError as error:
                self.note = str(error)
            self._playhead = self._playhead.with_paused(True, time.monotonic())
            self._moment = None

    async def _scan(self) -> None:
        with RecordingReader(self._path) as reader:
            progress = scan(reader, self.index)
            while await asyncio.to_thread(next, progress, None) is not None:
                await asyncio.sleep(0)

    async def _advance(self) -> None:
        """Does one thing: a seek, a step, some due messages, or a wait."""
        self._changed.clear()
        if self._target_ts is not None:
            await self._seek()
        elif self._steps:
            self._steps -= 1
            self._apply_next()
        elif self._playhead.paused:
            await self._changed.wait()
        else:
            await self._play()

    async def _play(self) -> None:
        for _ in range(YIELD_EVERY):
            message = self._peek()
            self._at_end = message is None
            if message is None:
                self._playhead = self._playhead.moved_to(self._clock_ts, time.monotonic())
                return await self._pause(FOLLOW_S)
            ahead_s = (message.ts - self._now_ts()) / self._playhead.speed
            if ahead_s > 0:
                return await self._pause(ahead_s)
            self._apply_next()
        return await asyncio.sleep(0)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _peek(self) -> wire.StreamMessage | None:
        """The next message, without applying it; None at the end of the file so far."""
        while self._next is None:
            try:
                entry = self._reader.next()
            except RecordingError as error:
                self.note = str(error)
                return None
            if entry is None:
                return None
            self._next = self._message(entry, self.feed.data)
        return self._next

    def _apply_next(self) -> None:
        message = self._peek()
        self._next = None
        if message is not None:
            self._apply_or_skip(self.feed.data, message)
            self._clock_ts = max(self._clock_ts, message.ts)
            self.index.last_ts = max(self.index.last_ts, self._clock_ts)
            self.feed.received = time.monotonic()
            if self._playhead.paused:
                self._playhead = self._playhead.moved_to(self._clock_ts, time.monotonic())

    def _apply_or_skip(self, data: FeedData, message: wire.StreamMessage) -> None:
        if self._skipping and not isinstance(message, wire.Hello):
            return
        self._skipping = False
        try:
            data.apply(message)
        except ResyncNeeded as reason:
            self._skipping = True
            self.note = f"a gap before {clock(message.ts)}"
            self.note += f" ({reason}): the view is frozen until the next snapshot"

    def _read_past(self, place: Place, line: bytes) -> _Past:
        return self._reader.parse(_pasts, place, line) or _Past("")

    def _message(self, entry: Entry, data: FeedData) -> wire.StreamMessage | None:
        """The message of a line. An audit entry is added to `data` at once, because no message
        depends on it.
        """
        line = entry.line
        if isinstance(line, wire.AuditLine):
            data.add_audit([line.entry])
        elif not isinstance(line, wire.RecordingHeader):
            return line
        return None

    # ------------------------------------------------------------ seeking

    async def _seek(self) -> None:
        target_ts = self._target_ts
        assert target_ts is not None
        try:
            data = await asyncio.to_thread(self._load, target_ts)
        except RecordingError as error:
            self.note = str(error)
        else:
            self.feed.replace(data)
        self._playhead = self._playhead.moved_to(target_ts, time.monotonic())
        self._at_end = False
        if self._target_ts == target_ts:
            self._target_ts = None

    def _load(self, target_ts: float) -> FeedData:
        """The data at `target_ts`. Leaves the reader behind that moment. Raises RecordingError."""
        frame, begin = self.index.before(target_ts), self.index.before(target_ts - HISTORY_S)
        assert frame is not None
        assert begin is not None
        data, epoch = FeedData(), ""
        others, frequent = (deque[wire.Event](maxlen=MAX_EVENTS) for _ in range(2))
        audit = deque[wire.AuditEntry](maxlen=MAX_AUDIT)
        self._reader.seek(begin.place)
        self._next, self._skipping, self._clock_ts = None, False, frame.ts
        while (found := self._reader.raw()) is not None and found[0].number < frame.place.number:
            past = self._read_past(*found)
            if past.type == "hello" and past.epoch != epoch:
                epoch = past.epoch
                others.clear()
                frequent.clear()
            if past.event is not None:
                kept = frequent if past.event.kind in wire.FREQUENT_KINDS else others
                kept.append(past.event)
            if past.entry is not None:
                audit.append(past.entry)
            if past.status is not None:
                data.add_sample(wire.Point.of(past.status))
        self._reader.seek(frame.place)
        entry = self._reader.next()
        while entry is not None:
            message = self._message(entry, data)
            if message is not None:
                if max(self._clock_ts, message.ts) > target_ts and data.model.synced:
                    self._next = message
                    break
                self._clock_ts = max(self._clock_ts, message.ts)
                self._apply_or_skip(data, message)
                if isinstance(message, wire.Hello) and message.epoch == epoch:
                    data.add_past_events([*others, *frequent])
                    data.add_audit(audit)
            entry = self._reader.next()
        return data
