"""Fetches the text of the requests in a stream, with a bounded load on the server:

1. A request is fetched again when its tokens, its dead tokens or the configuration have changed, at
   most every EVERY_S for each of its pages.
2. At most MAX_REQUESTS of at most MAX_TOKENS each are tracked at once.
3. A turn makes at most MAX_CALLS calls. Turns take at most a fifth of the time, so a slow server
   gets fewer calls.
4. A refused call ends the turn, and the next one begins PAUSE_S later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

from vtoken import wire
from vtoken.client import Client, ProblemError, RequestText
from vtoken.client.calls import Call
from vtoken.client.request_text import PAGE_TOKENS
from vtoken.client.sequences import Pages
from vtoken.wire.reducer import StreamState

EVERY_S = 2.0
MAX_REQUESTS = 64
MAX_TOKENS = 65_536
MAX_CALLS = 8
TURN_S = 0.25
PAUSE_S = 5.0
IDLE_TURNS = 4.0  # a turn of d seconds is followed by a wait of this times d
CALL_TIMEOUT_S = 3.0  # the stream is not read during a call; the server drops it after 5 s


class _Tracked:
    """`seen`: live and dead tokens and revision at the last fetch; `written`: token count, dead
    tokens and revision of the newest text written.
    """

    def __init__(self, request_id: str, now: float) -> None:
        self.text = RequestText(request_id)
        self.seen: tuple[int, int, int] | None = None
        self.written: tuple[int, ...] = ()
        self.due = now


class TextReader:
    """`turn` fetches some of what is due and passes every complete text to `write`."""

    def __init__(
        self,
        client: Client,
        write: Callable[[wire.TextPage], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_texts = 0  # written
        self.num_requests = 0  # with at least one text written
        self.num_unread = 0  # requests that ended before their text was fetched
        self.num_refused = 0  # calls
        self._client = Client(client.server, timeout_s=CALL_TIMEOUT_S)
        self._write = write
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}
        self._unread: set[str] = set()
        self._too_long: set[str] = set()
        self._reading: tuple[_Tracked, Pages[wire.TextPage], Call[wire.TextPage]] | None = None
        self._next_turn = 0.0
        self._problem = ""  # of the newest refused call

    def close(self) -> None:
        """End the recording; the remaining requests count as unread."""
        self._client.close()
        self.num_unread += len(self._unread)
        self._unread.clear()

    def skipped(self) -> list[str]:
        """One line for each kind of text missing from the recording."""
        lines = []
        if self.num_unread:
            reason = "they, or the recording, ended before it was fetched"
            lines.append(f"requests without text: {self.num_unread:,} ({reason})")
        if self._too_long:
            reason = "their text is incomplete or missing"
            lines.append(
                f"requests of more than {MAX_TOKENS:,} tokens: {len(self._too_long):,} ({reason})"
            )
        if self.num_refused:
            lines.append(f"failed calls for text: {self.num_refused:,}; the last: {self._problem}")
        return lines

    def turn(self, state: StreamState) -> None:
        """Fetch some of what is due in `state`."""
        began = self._clock()
        self._track(state.requests, began)
        if began < self._next_turn:
            return
        try:
            for _ in range(MAX_CALLS):
                if not self._call(state, began):
                    return
                spent_s = self._clock() - began
                self._next_turn = began + spent_s + max(TURN_S, IDLE_TURNS * spent_s)
                if spent_s > TURN_S:
                    return
        except ProblemError as error:
            self.num_refused += 1
            self._problem = error.problem.detail
            now = self._clock()
            self._next_turn = now + max(PAUSE_S, IDLE_TURNS * (now - began))

    def _track(self, rows: Mapping[str, wire.RequestRow], now: float) -> None:
        """Update the sets of unread and tracked requests."""
        for finished in self._tracked.keys() - rows.keys():
            del self._tracked[finished]
        ended = self._unread - rows.keys()
        self.num_unread += len(ended)
        self._unread -= ended
        for name, row in rows.items():
            if not row.blocks or name in self._tracked or name in self._too_long:
                continue
            self._unread.add(name)
            if len(self._tracked) < MAX_REQUESTS:
                self._tracked[name] = _Tracked(name, now)

    def _call(self, state: StreamState, now: float) -> bool:
        """Make one call, if any is due; returns whether it did. Raises ProblemError."""
        reading = self._reading or self._begin(state, now)
        self._reading = None
        if reading is None:
            return False
        tracked, pages, call = reading
        try:
            page = self._client.send(call)
        except ProblemError as error:
            tracked.seen, tracked.due = None, now + EVERY_S
            if error.problem.status != HTTPStatus.NOT_FOUND:
                raise
            return True  # the request has just ended, or holds no blocks
        try:
            self._reading = tracked, pages, pages.send(page)
        except StopIteration:
            self._finish(tracked, now)
        return True

    def _begin(
        self, state: StreamState, now: float
    ) -> tuple[_Tracked, Pages[wire.TextPage], Call[wire.TextPage]] | None:
        """The first call for the text that has waited longest."""
        revision = 0 if state.config is None else state.config.revision
        for tracked in sorted(self._tracked.values(), key=lambda each: each.due):
            name = tracked.text.request_id
            row = state.requests[name]
            seen = row.live, row.dead, revision
            if row.live + row.dead > MAX_TOKENS:
                del self._tracked[name]
                self._too_long.add(name)
                self._unread.discard(name)
            elif tracked.due <= now and row.blocks and tracked.seen != seen:
                tracked.seen = seen
                pages = tracked.text.refresh(row.dead, revision)
                return tracked, pages, next(pages)
        return None

    def _finish(self, tracked: _Tracked, now: float) -> None:
        text = tracked.text
        tracked.due = now + EVERY_S * max(1.0, len(text.tokens) / PAGE_TOKENS)
        known = len(text.tokens), *(tracked.seen or ())[1:]
        if known == tracked.written:
            return  # the newest text already has this state
        tracked.written = known
        if text.request_id in self._unread:
            self._unread.remove(text.request_id)
            self.num_requests += 1
        self.num_texts += 1
        self._write(text.page())
