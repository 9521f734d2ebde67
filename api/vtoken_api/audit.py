"""The audit log: who changed or tried out what, newest last, bounded, in memory.

Knows accepted calls only: a refused call changes nothing and leaves no entry. One API server
process, one log; `GET /events` has the changes of all of them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vtoken import wire
from vtoken_api.log import logger

MAX_ENTRIES = 1000


class AuditLog:
    """At most `MAX_ENTRIES` entries; `dropped` counts the older ones."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: deque[wire.AuditEntry] = deque(maxlen=max_entries)
        self._total = 0

    def record(
        self,
        actor: str,
        action: str,
        changes: dict[str, list[Any]],
        revision: int,
        *,
        dry_run: bool = False,
    ) -> None:
        """Append an entry and log it; `changes` is field -> [old, new]."""
        entry = wire.AuditEntry(
            ts=time.time(),
            actor=actor,
            action=action,
            changes=changes,
            revision=revision,
            dry_run=dry_run,
        )
        self._entries.append(entry)
        self._total += 1
        if not dry_run:
            logger.info("vtoken: %s by %s: %s (revision %d)", action, actor, changes, revision)

    def page(self, limit: int) -> wire.AuditPage:
        """The newest `limit` entries, oldest first."""
        held = list(self._entries)
        return wire.AuditPage(entries=held[-limit:], dropped=self._total - len(held))
