"""The text of the requests that a stream shows, read beside it with few calls.

Knows the client and the rows of requests, no file. A recorder must not slow the server down:

1. A request is read again when its tokens, its dead tokens or the configuration have changed, and
   at most every EVERY_S for each page that it has.
2. At most MAX_REQUESTS are followed at once, of MAX_TOKENS at most each.
3. A turn makes at most MAX_CALLS calls. The turns take at most a fifth of the time, so that a
   server that answers slowly is asked less often.
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
from vtoken.stream.reducer import StreamState

EVERY_S = 2.0
MAX_REQUESTS = 64
MAX_TOKENS = 65_536
MAX_CALLS = 8
TURN_S = 0.25
PAUSE_S = 5.0
IDLE_TURNS = 4.0  # a turn of d seconds is followed by a wait of this times d
CALL_TIMEOUT_S = 3.0  # the stream is not read meanwhile; the server waits 5 s for its reader


class _Followed:
    """`seen`: what its row and the configuration said when it was last read; `written`: what of
    that, and how many tokens, is in the newest text written.
    """

    def __init__(self, request_id: str, now: float) -> None:
        self.text = RequestText(request_id)
        self.seen: tuple[int, int, int] | None = None
        self.written: tuple[int, ...] = ()
        self.due = now


class TextReader:
    """`turn` reads some of what is due, and gives `write` every text that was read to its end."""

    def __init__(
        self,
        client: Client,
        write: Callable[[wire.TextPage], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_texts = 0  # written
        self.num_requests = 0  # of which at least one text was written
        self.num_unread = 0  # that ended before their text was read
        self.num_refused = 0  # calls
        self._client = Client(client.server, timeout_s=CALL_TIMEOUT_S)
        self._write = write
        self._clock = clock
        self._followed: dict[str, _Followed] = {}
        self._unread: set[str] = set()
        self._too_long: set[str] = set()
        self._reading: tuple[_Followed, Pages[wire.TextPage], Call[wire.TextPage]] | None = None
        self._next_turn = 0.0
        self._problem = ""  # of the newest refused call

    def close(self) -> None:
        """The end of the recording; what has not been read will not be."""
        self._client.close()
        self.num_unread += len(self._unread)
        self._unread.clear()

    def skipped(self) -> list[str]:
        """What is not in the recording, a line each."""
        said = []
        if self.num_unread:
            why = "they, or the recording, ended before it was read"
            said.append(f"requests without text: {self.num_unread:,} ({why})")
        if self._too_long:
            why = "their text was not read any more"
            said.append(
                f"requests of more than {MAX_TOKENS:,} tokens: {len(self._too_long):,} ({why})"
            )
        if self.num_refused:
            said.append(f"failed calls for text: {self.num_refused:,}, the last: {self._problem}")
        return said

    def turn(self, state: StreamState) -> None:
        """Read some of what is due in `state`."""
        began = self._clock()
        self._look(state.requests, began)
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

    def _look(self, rows: Mapping[str, wire.RequestRow], now: float) -> None:
        """Which requests there are now, and which of these are followed."""
        for gone in self._followed.keys() - rows.keys():
            del self._followed[gone]
        ended = self._unread - rows.keys()
        self.num_unread += len(ended)
        self._unread -= ended
        for name, row in rows.items():
            if not row.blocks or name in self._followed or name in self._too_long:
                continue
            self._unread.add(name)
            if len(self._followed) < MAX_REQUESTS:
                self._followed[name] = _Followed(name, now)

    def _call(self, state: StreamState, now: float) -> bool:
        """One call, if there is one to be made; raises ProblemError."""
        reading = self._reading or self._begin(state, now)
        self._reading = None
        if reading is None:
            return False
        followed, pages, call = reading
        try:
            page = self._client.send(call)
        except ProblemError as error:
            followed.seen, followed.due = None, now + EVERY_S
            if error.problem.status != HTTPStatus.NOT_FOUND:
                raise
            return True  # it has just ended, or holds no blocks
        try:
            self._reading = followed, pages, pages.send(page)
        except StopIteration:
            self._finish(followed, now)
        return True

    def _begin(
        self, state: StreamState, now: float
    ) -> tuple[_Followed, Pages[wire.TextPage], Call[wire.TextPage]] | None:
        """The first call for the text that waits longest."""
        revision = 0 if state.config is None else state.config.revision
        for followed in sorted(self._followed.values(), key=lambda each: each.due):
            name = followed.text.request_id
            row = state.requests[name]
            seen = row.live, row.dead, revision
            if row.live + row.dead > MAX_TOKENS:
                del self._followed[name]
                self._too_long.add(name)
                self._unread.discard(name)
            elif followed.due <= now and row.blocks and followed.seen != seen:
                followed.seen = seen
                pages = followed.text.refresh(row.dead, revision)
                return followed, pages, next(pages)
        return None

    def _finish(self, followed: _Followed, now: float) -> None:
        text = followed.text
        followed.due = now + EVERY_S * max(1.0, len(text.tokens) / PAGE_TOKENS)
        known = len(text.tokens), *(followed.seen or ())[1:]
        if known == followed.written:
            return  # its row said later what the text before had already
        followed.written = known
        if text.request_id in self._unread:
            self._unread.remove(text.request_id)
            self.num_requests += 1
        self.num_texts += 1
        self._write(text.page())
