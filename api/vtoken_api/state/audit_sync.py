"""Background upkeep of the audit log: entries for the engine's own actions, and disk retries.

No call ends a trial that the engine reverts or keeps.

1. An entry has the epoch and `seq` of its event, so no event is entered twice.
2. The events after the newest entry are fetched from the engine, so none is missed. An arriving
   event only triggers the fetch.
"""

from __future__ import annotations

import asyncio
import contextlib

from vtoken import wire
from vtoken_api.fanout.hub import Hub
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.audit import AuditLog

PERIOD_S = 5.0  # between two fetches without an event


class AuditSync:
    """`start` once, inside the event loop."""

    def __init__(self, hub: Hub, audit: AuditLog) -> None:
        self._hub = hub
        self._audit = audit
        self._synced_to: int | None = None  # `seq` of the last event handled
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        hub.on_events = self._note

    def start(self) -> None:
        """Begin, in the background."""
        self._task = asyncio.create_task(self._run(), name="vtoken-audit-sync")

    async def close(self) -> None:
        """Stop; the audit log still writes the entries it has."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # ------------------------------------------------------------ inside

    def _note(self, events: list[wire.Event], lost: int) -> None:
        if lost or any(map(_is_engine_action, events)):
            self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._audit.probe()
                await self._catch_up()
            except ProblemError:
                pass  # the engine does not answer now
            except Exception:
                logger.exception("vtoken: the synchronization of the audit log failed; retrying")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._wake.wait()

    async def _catch_up(self) -> None:
        epoch = (await self._hub.describe()).epoch
        if self._synced_to is None:
            self._synced_to = await self._audit.newest_event(epoch)
        page = await self._hub.config_events(self._synced_to)
        while page.events:
            for event in filter(_is_engine_action, page.events):
                self._audit.enter(_entry(event, epoch))
            self._synced_to = page.events[-1].seq
            page = await self._hub.config_events(self._synced_to)
        self._synced_to = max(self._synced_to, page.last_seq)


def _is_engine_action(event: wire.Event) -> bool:
    return event.kind == "config" and event.data.get("actor") in ("trial", "guard")


def _entry(event: wire.Event, epoch: str) -> wire.AuditEntry:
    data = event.data
    return wire.AuditEntry(
        ts=event.ts,
        actor=data["actor"],
        action="revert" if "reverted" in data else "keep",
        changes=data["changes"],
        revision=data["revision"],
        dry_run=False,
        epoch=epoch,
        event_seq=event.seq,
    )
