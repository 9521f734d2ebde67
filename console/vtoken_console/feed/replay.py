"""A recording as a source: played, paused, stepped and searched like a tape.

Knows recordings and the feed, no socket. A jump builds the model anew from a key frame, with the
charts and the log of the time before it, and shows it when it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from pathlib import Path

import msgspec

from vtoken import wire
from vtoken.recording import Entry, Index, Place, RecordingError, RecordingReader, Text, scan
from vtoken.stream.reducer import MAX_EVENTS, ResyncNeeded
from vtoken_console.feed.connection import State
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.not_recorded import NotRecorded
from vtoken_console.feed.picture import MAX_AUDIT, Picture
from vtoken_console.feed.playhead import Bar, Playhead, parse_moment

HISTORY_S = 900.0  # charts and log reach so far back after a jump
FOLLOW_S = 0.5  # between two looks at a file that may still grow
YIELD_EVERY = 64


class _Past(msgspec.Struct):
    """Of a message before the key frame: what charts and log need."""

    type: str
    epoch: str = ""
    event: wire.Event | None = None
    status: wire.Status | None = None
    entry: wire.AuditEntry | None = None


class Replay:
    """Plays `path`; `run` never returns by itself. Raises RecordingError for no recording."""

    def __init__(self, path: Path, *, moment: str | None = None) -> None:
        self.name = path.name
        self.feed = Feed()
        self.rest = NotRecorded(lambda: self.feed.model)
        self.index = Index()
        self.note = ""
        self._path = path
        self._reader = RecordingReader(path)
        self._past = msgspec.json.Decoder(_Past)
        self._playhead = Playhead()
        self._next: wire.StreamMessage | None = None
        self._clock_ts = 0.0  # of the last message applied; never goes back
        self._goal: float | None = None
        self._steps = 0
        self._at_end = False
        self._skipping = False  # to the next key frame, after a gap
        self._moment = moment  # None once it was gone to
        self._text: tuple[Text, wire.TextLine] | None = None  # that was read last
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ controls

    @property
    def replay(self) -> Bar | None:
        index, playhead = self.index, self._playhead
        return Bar(
            name=self._path.name,
            ts=self._goal if self._goal is not None else min(self._now_ts(), index.last_ts),
            first_ts=index.first_ts,
            last_ts=index.last_ts,
            speed=playhead.speed,
            paused=playhead.paused,
            at_end=self._at_end,
            indexed=index.complete,
            marks=tuple((mark.ts, mark.kind, mark.text) for mark in index.marks),
            note=self.note or str(index.error or "") or index.torn,
        )

    @property
    def ready(self) -> bool:
        return self.feed.ready and self._goal is None and self._moment is None

    def retry_now(self) -> None:
        """A file is read or it is not; there is nothing to try again."""

    def toggle_pause(self) -> None:
        if self._at_end and not self._playhead.paused:
            self.seek(self.index.first_ts)
            return
        self._playhead = self._playhead.pausing(not self._playhead.paused, time.monotonic())
        self._changed.set()

    def faster(self, steps: int) -> None:
        self._playhead = self._playhead.faster(steps, time.monotonic())
        self._changed.set()

    def step(self) -> None:
        """Pause, and apply one message."""
        self._playhead = self._playhead.pausing(True, time.monotonic())
        self._steps += 1
        self._changed.set()

    def seek(self, ts: float) -> None:
        """Go to a moment; one outside the recording is its nearest end."""
        self.note = ""
        self._goal = max(self.index.first_ts, min(ts, self.index.last_ts))
        self._steps = 0
        self._changed.set()

    def seek_by(self, seconds: float) -> None:
        self.seek((self._now_ts() if self._goal is None else self._goal) + seconds)

    def seek_text(self, text: str) -> None:
        """Go to the moment that a person typed; raises ValueError."""
        self.seek(parse_moment(text, self.index.first_ts, self.index.last_ts))

    def _now_ts(self) -> float:
        return self._playhead.ts(time.monotonic())

    # ------------------------------------------------------------ text

    @property
    def holds_text(self) -> bool:
        """Whether text of requests may be in the recording."""
        header = self._reader.header
        return bool(self.index.texts) or (header is not None and header.holds_text)

    async def text(self, request_id: str) -> wire.TextLine | None:
        """The newest text of a request at the moment that is shown, or before; None where there is
        none. Raises RecordingError.
        """
        bar = self.replay
        assert bar is not None
        text = self.index.text_before(request_id, bar.ts)
        if text is None:
            return None
        if self._text is None or self._text[0] != text:
            self._text = text, await asyncio.to_thread(self._read_text, text)
        return self._text[1]

    def _read_text(self, text: Text) -> wire.TextLine:
        with RecordingReader(self._path) as reader:
            reader.seek(text.place)
            entry = reader.next()
        if entry is None or not isinstance(entry.line, wire.TextLine):
            raise RecordingError(self._path, "has changed since it was opened", text.place.number)
        return entry.line

    # ------------------------------------------------------------ playing

    async def run(self) -> None:
        self.feed.move(State.CONNECTING)
        scanning = asyncio.create_task(self._scan())
        try:
            while not self.index.keyframes:
                if self.index.complete:
                    why = str(self.index.error or "it holds no snapshot to begin with")
                    self.feed.move(State.REFUSED, f"{self._path.name}: {why}")
                    await asyncio.Event().wait()
                await asyncio.sleep(0.01)
            self.feed.move(State.SYNCING)
            await self._begin(scanning)
            while True:
                await self._turn()
        finally:
            scanning.cancel()
            self._reader.close()
            self.feed.move(State.CLOSED)

    async def _begin(self, scanning: asyncio.Task[None]) -> None:
        """At the start, or, paused, at the moment that was asked for."""
        self.seek(self.index.keyframes[0].ts)
        if self._moment is not None:
            await asyncio.wait([scanning])
            try:
                self.seek_text(self._moment)
            except ValueError as error:
                self.note = str(error)
            self._playhead = self._playhead.pausing(True, time.monotonic())
            self._moment = None

    async def _scan(self) -> None:
        with RecordingReader(self._path) as reader:
            turns = scan(reader, self.index)
            while await asyncio.to_thread(next, turns, None) is not None:
                await asyncio.sleep(0)

    async def _turn(self) -> None:
        """One thing: a jump, a step, some messages that are due, or a wait."""
        self._changed.clear()
        if self._goal is not None:
            await self._jump()
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
                self._playhead = self._playhead.at(self._clock_ts, time.monotonic())
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
        """The next message, not applied yet; None at the present end."""
        while self._next is None:
            try:
                entry = self._reader.next()
            except RecordingError as error:
                self.note = str(error)
                return None
            if entry is None:
                return None
            self._next = self._message(entry, self.feed.picture)
        return self._next

    def _apply_next(self) -> None:
        message = self._peek()
        self._next = None
        if message is not None:
            self._take_or_skip(self.feed.picture, message)
            self._clock_ts = max(self._clock_ts, message.ts)
            self.index.last_ts = max(self.index.last_ts, self._clock_ts)
            self.feed.received = time.monotonic()
            if self._playhead.paused:
                self._playhead = self._playhead.at(self._clock_ts, time.monotonic())

    def _take_or_skip(self, picture: Picture, message: wire.StreamMessage) -> None:
        if self._skipping and not isinstance(message, wire.Hello):
            return
        self._skipping = False
        try:
            picture.take(message)
        except ResyncNeeded as reason:
            self._skipping = True
            self.note = f"a gap before {time.strftime('%H:%M:%S', time.localtime(message.ts))}"
            self.note += f" ({reason}): the picture stands still until the next snapshot"

    def _read_past(self, place: Place, line: bytes) -> _Past:
        try:
            return self._past.decode(line)
        except msgspec.MsgspecError as error:
            if self._reader.is_of_another_type(line):
                return _Past("")
            raise RecordingError(self._path, f"not a recording: {error}", place.number) from error

    def _message(self, entry: Entry, picture: Picture) -> wire.StreamMessage | None:
        """The message of a line. What an audit line says goes to `picture` at once: no message
        depends on it. A text line is indexed, in case the file has grown since the scan.
        """
        line = entry.line
        if isinstance(line, wire.AuditLine):
            picture.add_audit([line.entry])
        elif isinstance(line, wire.TextLine):
            if self.index.complete:
                self.index.add_text(line.page.request_id, self._clock_ts, entry.place)
        elif not isinstance(line, wire.RecordingHeader):
            return line
        return None

    # ------------------------------------------------------------ jumping

    async def _jump(self) -> None:
        goal = self._goal
        assert goal is not None
        try:
            picture = await asyncio.to_thread(self._load, goal)
        except RecordingError as error:
            self.note = str(error)
        else:
            self.feed.show(picture)
        self._playhead = self._playhead.at(goal, time.monotonic())
        self._at_end = False
        if self._goal == goal:
            self._goal = None

    def _load(self, goal: float) -> Picture:
        """The picture at `goal`; the reader stands behind it. Raises RecordingError."""
        frame, begin = self.index.before(goal), self.index.before(goal - HISTORY_S)
        assert frame is not None
        assert begin is not None
        picture, epoch = Picture(), ""
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
                picture.sample(past.status)
        entry = None if found is None else Entry(found[0], self._reader.decode(*found))
        while entry is not None:
            message = self._message(entry, picture)
            if message is not None:
                if max(self._clock_ts, message.ts) > goal and picture.model.synced:
                    self._next = message
                    break
                self._clock_ts = max(self._clock_ts, message.ts)
                self._take_or_skip(picture, message)
                if isinstance(message, wire.Hello) and message.epoch == epoch:
                    picture.remember([*others, *frequent])
                    picture.add_audit(audit)
            entry = self._reader.next()
        return picture
