"""The audit log: changes and dry runs with their callers, on disk and across restarts.

It records accepted calls and changes that the engine reverted. A refused call leaves no entry.
`GET /events` lists what the engine did; the audit log lists who requested it.

1. The event loop never waits for the disk: one thread writes the entries in order.
2. A disk error does not stop the server: entries stay in memory, `error` and the log report it, and
   they are written, in order, when the disk accepts writes again (`probe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from vtoken import wire
from vtoken_api.log import logger
from vtoken_api.state.journal import Journal

MAX_UNWRITTEN = 1000
MAX_RECENT = 100
SETTLE_S = 1.0  # the longest that a call waits for its entry to reach the disk


class AuditLog:
    """Entries in `journal`; without one, the newest MAX_UNWRITTEN in memory."""

    def __init__(self, journal: Journal | None = None, *, error: str = "") -> None:
        self.error = error  # why entries are in memory only
        self.error_ts = time.time() if error else 0.0  # when `error` began
        self._journal = journal
        self._recent: deque[wire.AuditEntry] = deque(maxlen=MAX_RECENT)
        self._unwritten: deque[wire.AuditEntry] = deque()
        self._stamp: tuple[int, int] | None = None  # of the journal when `_shared` was read
        self._shared: list[wire.AuditEntry] = []
        self._lost = 0  # unwritten entries that newer ones displaced
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vtoken-audit")
        self._newest: Future[None] | None = None

    def record(
        self,
        actor: str,
        action: str,
        changes: dict[str, list[Any]],
        revision: int,
        *,
        dry_run: bool = False,
    ) -> None:
        """Append an entry and log it; `changes` is field -> [old, new]. Does not wait."""
        self.enter(
            wire.AuditEntry(
                ts=time.time(),
                actor=actor,
                action=action,
                changes=changes,
                revision=revision,
                dry_run=dry_run,
            )
        )

    def enter(self, entry: wire.AuditEntry) -> None:
        """Append `entry` and log it. Does not wait."""
        self._recent.append(entry)
        self._newest = self._thread.submit(self._take, entry)
        if not entry.dry_run:
            what = (entry.action, entry.actor, entry.changes, entry.revision)
            logger.info("vtoken: %s by %s: %s (revision %d)", *what)

    def recent(self) -> list[wire.AuditEntry]:
        """The newest MAX_RECENT entries, oldest first, of all processes that share the journal.

        Blocks on the disk if the journal changed. Without a disk: the entries of this process.
        """
        if self._journal is None or self.error:
            return list(self._recent)
        try:
            stamp = self._journal.stamp()
            if stamp != self._stamp:
                self._shared = _decode(self._journal.read(MAX_RECENT)[0])
                self._stamp = stamp
        except OSError:
            return list(self._recent)
        return self._shared

    async def settle(self) -> None:
        """Wait, at most SETTLE_S, until the newest entry is written or has failed."""
        if self._newest is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await asyncio.shield(asyncio.wrap_future(self._newest))

    async def newest_event(self, epoch: str) -> int:
        """The highest `event_seq` of an epoch in the log, 0 if none; raises OSError."""
        return await asyncio.wrap_future(self._thread.submit(self._newest_event, epoch))

    async def probe(self) -> None:
        """Check whether the disk accepts writes, and write the waiting entries."""
        if self._journal is not None:
            await asyncio.wrap_future(self._thread.submit(self._write, self._journal))

    async def page(self, limit: int) -> wire.AuditPage:
        """The newest `limit` entries, oldest first; unwritten ones are last."""
        return await asyncio.wrap_future(self._thread.submit(self._page, limit))

    def close(self) -> None:
        """Write what can be written and stop the thread."""
        self._thread.shutdown()

    # ------------------------------------------------------------ in the thread

    def _take(self, entry: wire.AuditEntry) -> None:
        self._unwritten.append(entry)
        if self._journal is not None:
            self._write(self._journal)
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._unwritten.popleft()
            self._lost += 1

    def _write(self, journal: Journal) -> None:
        try:
            if not self._unwritten:
                journal.check()
            while self._unwritten:
                journal.append(msgspec.json.encode(self._unwritten[0]))
                self._unwritten.popleft()
        except OSError as error:
            if not self.error:
                self.error_ts = time.time()
                logger.error(
                    "vtoken: cannot write the audit log; keeping entries in memory: %s", error
                )
            self.error = str(error)
            return
        if self.error:
            logger.warning("vtoken: the audit log is written again; %d entries lost", self._lost)
            self.error = ""

    def _newest_event(self, epoch: str) -> int:
        lines = [] if self._journal is None else self._journal.read(sys.maxsize)[0]
        entries = [*_decode(lines), *self._unwritten]
        return max((e.event_seq or 0 for e in entries if e.epoch == epoch), default=0)

    def _page(self, limit: int) -> wire.AuditPage:
        lines: list[bytes] = []
        dropped, error = self._lost, self.error
        if self._journal is not None:
            try:
                lines, older = self._journal.read(limit)
                dropped += older
            except OSError as fault:
                error = str(fault)
        entries = [*_decode(lines), *self._unwritten][-limit:]
        return wire.AuditPage(entries=entries, dropped=dropped, storage_error=error)


def _decode(lines: list[bytes]) -> list[wire.AuditEntry]:
    """The entries of these lines; skips a line that a crash truncated."""
    entries = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            entries.append(msgspec.json.decode(line, type=wire.AuditEntry))
    return entries
