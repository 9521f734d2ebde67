"""The audit log: changes and dry runs with their callers, on disk and across restarts.

It records accepted calls and changes that the engine reverted. A refused call leaves no entry.
`GET /events` lists what the engine did; the audit log lists who requested it.

1. The event loop never waits for the disk: one thread writes the entries in order.
2. A disk error does not stop the server: the newest MAX_UNWRITTEN entries stay in memory, `error`
   and the log report it, and they are written, in order, when the disk accepts writes again
   (`probe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from vtoken import wire
from vtoken.documents import Decoder, MalformedError
from vtoken_api.log import logger
from vtoken_api.state.journal import MAX_BYTES, Journal
from vtoken_api.state.statedir import StateDir

AUDIT_FILE = "audit.jsonl"
MAX_UNWRITTEN = 1000
SETTLE_S = 1.0  # the longest that a call waits for its entry to reach the disk

_entries: Decoder[wire.AuditEntry] = Decoder(wire.AuditEntry)


class AuditLog:
    """Entries in a journal in `state_dir`; `on_entry` is called for every new entry."""

    def __init__(self, state_dir: StateDir, *, max_bytes: int = MAX_BYTES) -> None:
        self.error = ""  # why entries are in memory only
        self.error_ts = 0.0  # when `error` began
        self.on_entry: Callable[[wire.AuditEntry], None] = lambda _: None
        self._state_dir = state_dir
        self._journal = Journal(state_dir.path / AUDIT_FILE, max_bytes)
        self._unwritten: deque[wire.AuditEntry] = deque()
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
        self.on_entry(entry)
        self._newest = self._thread.submit(self._take, entry)
        if not entry.dry_run:
            what = (entry.action, entry.actor, entry.changes, entry.revision)
            logger.info("vtoken: %s by %s: %s (revision %d)", *what)

    async def settle(self) -> None:
        """Wait, at most SETTLE_S, until the newest entry is written or has failed."""
        if self._newest is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await asyncio.shield(asyncio.wrap_future(self._newest))

    async def newest_event(self, epoch: str) -> int:
        """The highest `event_seq` of an epoch in the log, 0 if none."""
        return await asyncio.wrap_future(self._thread.submit(self._newest_event, epoch))

    async def probe(self) -> None:
        """Check whether the disk accepts writes, and write the waiting entries."""
        await asyncio.wrap_future(self._thread.submit(self._write))

    async def page(self, limit: int) -> wire.AuditPage:
        """The newest `limit` entries, oldest first; unwritten ones are last."""
        return await asyncio.wrap_future(self._thread.submit(self._page, limit))

    def close(self) -> None:
        """Write what can be written and stop the thread."""
        self._thread.shutdown()

    # ------------------------------------------------------------ in the thread

    def _take(self, entry: wire.AuditEntry) -> None:
        self._unwritten.append(entry)
        self._write()
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._unwritten.popleft()
            self._lost += 1

    def _write(self) -> None:
        try:
            self._state_dir.acquire()
            if not self._unwritten:
                self._journal.check()
            while self._unwritten:
                self._journal.append(msgspec.json.encode(self._unwritten[0]))
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
        entries = [*self._unwritten]
        with contextlib.suppress(OSError):
            entries += self._held(sys.maxsize)[0]
        return max((e.event_seq or 0 for e in entries if e.epoch == epoch), default=0)

    def _page(self, limit: int) -> wire.AuditPage:
        written: list[wire.AuditEntry] = []
        dropped, error = self._lost, self.error
        try:
            written, older = self._held(limit)
            dropped += older
        except OSError as fault:
            error = str(fault)
        entries = [*written, *self._unwritten][-limit:]
        return wire.AuditPage(entries=entries, dropped=dropped, storage_error=error)

    def _held(self, limit: int) -> tuple[list[wire.AuditEntry], int]:
        """The newest `limit` written entries, and how many are no longer held; raises OSError.

        Skips damaged lines, also one that a crash truncated.
        """
        self._state_dir.acquire()
        lines, dropped = self._journal.read(limit)
        entries = []
        for line in lines:
            with contextlib.suppress(MalformedError):
                entries.append(_entries.decode(line))
        return entries, dropped
