"""What an engine does by itself, entered in the audit log: how its trials end.

1. No call ends a trial that the engine reverts or keeps. Such events are fetched from the engine,
   so none is missed; an arriving event only triggers the fetch.
2. A trial that ended with its engine has no event. The process that follows the next engine finds
   it in the audit log, by the entry of its begin alone, and enters its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from vtoken import wire
from vtoken_api.fanout.hub import Hub
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.journal import Journal

RECENT_ENTRIES = 1000  # of the audit log, that a new process looks through
ENDED = "ended with a change on trial"
OF_TRIALS = frozenset({"trial", "confirm", "undo", "revert", "keep", ENDED})  # actions
PERIOD_S = 5.0  # between two fetches without an event


class OwnActions:
    """Of one engine. `on_end`: called with the end of each trial, in order."""

    def __init__(self, hub: Hub, journal: Journal, on_end: Callable[[wire.TrialEnd], None]) -> None:
        self._hub = hub
        self._journal = journal
        self._on_end = on_end
        self._seen: int | None = None  # `seq` of the newest event; None before the first look
        self._acted = asyncio.Event()

    def take(self, event: wire.Event) -> None:
        """Note whether a trial has ended."""
        if wire.TrialEnd.of(event) is not None:
            self._acted.set()

    async def run(self) -> None:
        """Enter what the engine does, until cancelled."""
        self._hub.tell("config", self.take)
        while True:
            self._acted.clear()
            try:
                await self._journal.probe()
                await self._catch_up()
            except ProblemError:
                pass  # the engine does not answer now
            except Exception:
                logger.exception("vtoken: cannot enter the engine's actions; retrying")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._acted.wait()

    async def _catch_up(self) -> None:
        """Enter how trials ended, and pass it on."""
        described = await self._hub.describe()
        if self._seen is None:
            entries = (await self._journal.entries(RECENT_ENTRIES)).entries
            self._enter_ended(entries, described.started_ts)
            self._seen = 0
        missed = await self._hub.events_after(self._seen, "config")
        for event in missed.events:
            if (end := wire.TrialEnd.of(event)) is not None:
                if end.confirmed is None:
                    self._journal.enter(_entry(event, end, described.epoch, self._hub.rank))
                self._on_end(end)
        self._seen = missed.last_seq

    def _enter_ended(self, entries: Sequence[wire.AuditEntry], started_ts: float) -> None:
        """Enter the end of a trial that began before this engine and that nothing has ended."""
        here = (None, self._hub.rank)
        of_trials = [e for e in entries if e.action in OF_TRIALS and e.engine in here]
        newest = next((e for e in reversed(of_trials) if not e.dry_run), None)
        if newest is not None and newest.action == "trial" and newest.ts < started_ts:
            self._journal.enter(
                wire.AuditEntry(
                    ts=time.time(),
                    actor="engine",
                    action=ENDED,
                    changes={},
                    revision=newest.revision,
                    dry_run=False,
                    engine=self._hub.rank,
                )
            )


def _entry(event: wire.Event, end: wire.TrialEnd, epoch: str, engine: int) -> wire.AuditEntry:
    return wire.AuditEntry(
        ts=event.ts,
        actor=end.actor,
        action="keep" if end.reverted is None else "revert",
        changes=event.data["changes"],
        revision=end.revision,
        dry_run=False,
        epoch=epoch,
        event_seq=event.seq,
        engine=engine,
    )
