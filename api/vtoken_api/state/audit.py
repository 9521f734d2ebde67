"""The audit log: changes and dry runs with their callers, on disk and across restarts.

It has accepted calls and changes that the engine reverted. A refused call leaves no entry.
`GET /events` lists what the engine did; the audit log lists who requested it.

While entries cannot be written, the newest MAX_UNWRITTEN stay in memory, and `error` and the log
say so.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken_api.log import logger
from vtoken_api.state.rotating import MAX_BYTES, RotatingFile
from vtoken_api.state.statedir import StateDir

AUDIT_FILE = "audit.jsonl"
MAX_UNWRITTEN = 1000

_entries: Decoder[wire.AuditEntry] = Decoder(wire.AuditEntry)


class AuditLog:
    """Entries in a rotating file in `state_dir`. All methods block on the disk: call them from one
    thread."""

    def __init__(self, state_dir: StateDir, *, max_bytes: int = MAX_BYTES) -> None:
        self.error = ""  # why entries are in memory only
        self.error_ts = 0.0  # when `error` began
        self._state_dir = state_dir
        self._file = RotatingFile(state_dir.path / AUDIT_FILE, max_bytes)
        self._unwritten: deque[wire.AuditEntry] = deque()
        self._lost = 0  # unwritten entries that newer ones displaced

    def append(self, entry: wire.AuditEntry) -> None:
        """Write `entry`, or keep it in memory."""
        self._unwritten.append(entry)
        self.write()
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._unwritten.popleft()
            self._lost += 1

    def write(self) -> None:
        """Write the entries in memory, in order; without any, check whether one could be."""
        try:
            self._state_dir.acquire()
            if not self._unwritten:
                self._file.check()
            while self._unwritten:
                self._file.append(msgspec.json.encode(self._unwritten[0]))
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

    def newest_event(self, epoch: str) -> int:
        """The highest `event_seq` of an epoch, 0 if none."""
        entries = [*self._unwritten]
        with contextlib.suppress(OSError):
            entries += self._held(sys.maxsize)[0]
        return max((e.event_seq or 0 for e in entries if e.epoch == epoch), default=0)

    def page(self, limit: int) -> wire.AuditPage:
        """The newest `limit` entries, oldest first; unwritten ones are last."""
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
        lines, dropped = self._file.read(limit)
        entries = []
        for line in lines:
            with contextlib.suppress(MalformedError):
                entries.append(_entries.decode(line))
        return entries, dropped
