"""What the audit log needs without being called: the engine's own acts, and a disk that is tried.

Knows the hub, the audit log and who leads. A trial that is taken back, or kept, has nobody who
called; every process of the server sees its event, and may end before the others or the engine.

1. Only the process that leads enters them; without a state directory each does, in memory.
2. An entry carries the epoch and `seq` of its event; what the log has already is not entered again.
3. Who leads asks the engine itself for the events after the newest entry, so that none is missed;
   one that arrives only says that it is time to ask.
"""

from __future__ import annotations

import asyncio
import contextlib

from vtoken import wire
from vtoken_api.fanout.hub import Hub
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.statedir import StateDir

PERIOD_S = 5.0  # between two looks, when nothing is heard


class AuditSync:
    """`start` once, inside the event loop."""

    def __init__(self, hub: Hub, audit: AuditLog, state_dir: StateDir) -> None:
        self._hub = hub
        self._audit = audit
        self._state_dir = state_dir
        self._seen_to: int | None = None  # every event up to it needs no look; None: not led yet
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        hub.on_events = self._note

    def start(self) -> None:
        """Begin, in the background."""
        self._task = asyncio.create_task(self._run(), name="vtoken-audit-sync")

    async def close(self) -> None:
        """Stop; what was entered is written by the audit log."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # ------------------------------------------------------------ inside

    def _note(self, events: list[wire.Event], lost: int) -> None:
        if lost or any(map(_is_own_act, events)):
            self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._audit.probe()
                if self._state_dir.error or self._state_dir.try_lead():
                    await self._catch_up()
            except ProblemError:
                pass  # the engine does not answer now
            except Exception:
                logger.exception(
                    "vtoken: the synchronization of the audit log failed, trying again"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._news.wait()

    async def _catch_up(self) -> None:
        epoch = (await self._hub.describe()).epoch
        if self._seen_to is None:
            self._seen_to = await self._audit.newest_event(epoch)
        page = await self._hub.config_events(self._seen_to)
        while page.events:
            for event in filter(_is_own_act, page.events):
                self._audit.enter(_entry(event, epoch))
            self._seen_to = page.events[-1].seq
            page = await self._hub.config_events(self._seen_to)
        self._seen_to = max(self._seen_to, page.last_seq)


def _is_own_act(event: wire.Event) -> bool:
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
