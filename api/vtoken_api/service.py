"""The service behind routes and stream: engines, changes, journal and access control."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from vtoken_api.auth.check import AccessControl
from vtoken_api.changes import Changes
from vtoken_api.fleet import Fleet
from vtoken_api.state.journal import Journal
from vtoken_api.state.statedir import StateDir
from vtoken_api.text import RequestTexts


@dataclass(slots=True)
class Service:
    """One per server."""

    fleet: Fleet
    auth: AccessControl
    state: StateDir
    journal: Journal
    texts: RequestTexts
    model_name: str  # as vLLM's metrics name it
    changes: Changes

    def start(self) -> None:
        """Start following and recording the engines."""
        for engine in self.fleet.engines:
            engine.recorder.on_end = partial(self.changes.follow, engine.rank)
            engine.start()

    async def close(self) -> None:
        """Stop the background tasks and release the state directory; clients stay connected."""
        await self.changes.close()
        for engine in self.fleet.engines:
            await engine.close()
        await self.journal.close()
        self.state.close()
