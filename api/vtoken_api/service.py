"""The service behind routes and stream: engines, changes, journal and access control.

Every API process has one. On a server with several, one of them is the *owner*: `own` begins what
only it does (`vtoken_api.processes`). The others serve their streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial

from vtoken import wire
from vtoken_api.auth.check import AccessControl
from vtoken_api.changes import Changes
from vtoken_api.fleet import Fleet
from vtoken_api.processes.figures import EngineFigures, Figures
from vtoken_api.processes.member import Member
from vtoken_api.state.journal import Journal
from vtoken_api.state.statedir import StateDir
from vtoken_api.text import RequestTexts

ACQUIRE_S = 2.0  # the longest that the state directory of an owner that ended stays locked


@dataclass(slots=True)
class Service:
    """One per API process. `member`: None if it is the only one."""

    fleet: Fleet
    auth: AccessControl
    state: StateDir
    journal: Journal
    texts: RequestTexts
    model_name: str  # as vLLM's metrics name it
    changes: Changes
    member: Member | None = None
    _completing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start following the engines."""
        for engine in self.fleet.engines:
            engine.recorder.on_action = partial(self.changes.follow, engine.rank)
            engine.start()

    async def own(self) -> None:
        """Start recording the engines, and complete what an earlier owner began."""
        if self.member is not None:
            await self._acquire()
        for engine in self.fleet.engines:
            engine.recorder.start()
        self._completing = asyncio.create_task(self.changes.complete_left())

    async def resign(self) -> None:
        """Stop what only the owner does, and release the state directory."""
        await self._stop()
        with contextlib.suppress(OSError):
            await self.journal.on_disk(self.state.close)  # behind what is being written

    async def close(self) -> None:
        """Stop the background tasks and release the state directory; clients stay connected."""
        if self.member is not None:
            await self.member.close()
        await self._stop()
        for engine in self.fleet.engines:
            await engine.close()
        await self.journal.close()
        self.state.close()
        if self.member is not None:
            self.member.leave()

    async def _stop(self) -> None:
        if self._completing is not None:
            self._completing.cancel()
            await asyncio.gather(self._completing, return_exceptions=True)
        await self.changes.close()
        for engine in self.fleet.engines:
            await engine.recorder.close()

    # ------------------------------------------------------------ what this process counts

    def figures(self) -> Figures:
        """What this process counts itself."""
        return Figures(
            refused=dict(self.auth.refusals.counts),
            engines={
                engine.rank: EngineFigures(
                    engine.hub.num_clients, engine.hub.num_dropped, engine.recorder.num_faults
                )
                for engine in self.fleet.engines
            },
        )

    def all_figures(self) -> Figures:
        """What all API processes count."""
        return self.figures() if self.member is None else self.member.figures()

    def own_health(self) -> dict[int, list[wire.Health]]:
        """The health of audit log and recorders in this process, by the engine's rank."""
        return {engine.rank: engine.own_health() for engine in self.fleet.engines}

    # ------------------------------------------------------------ inside

    async def _acquire(self) -> None:
        """Wait until the directory of an owner that has just ended is free."""
        deadline = time.monotonic() + ACQUIRE_S
        while time.monotonic() < deadline:
            try:
                await self.journal.acquire()
            except BlockingIOError:
                await asyncio.sleep(0.02)
            except OSError:
                return  # the recorder says so, and tries again
            else:
                return
