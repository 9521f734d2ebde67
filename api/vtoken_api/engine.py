"""One engine of this server, as the API sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken import wire
from vtoken.sentences.situation import situation
from vtoken_api.bus import EngineBus
from vtoken_api.fanout.hub import Hub
from vtoken_api.health import health
from vtoken_api.state.journal import Journal
from vtoken_api.state.recorder import Recorder


@dataclass(slots=True)
class Engine:
    """Its bus, the hub of its stream and its flight recorder; `rank` is vLLM's."""

    bus: EngineBus
    hub: Hub
    recorder: Recorder
    journal: Journal
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.bus.rank
        self.hub.complete = self.complete

    def start(self) -> None:
        """Follow the engine and record it."""
        self.hub.start()
        self.recorder.start()

    async def close(self) -> None:
        await self.recorder.close()
        await self.hub.close()

    def health(self) -> list[wire.Health]:
        """The health of the engine and of what is kept of it, part by part."""
        return health(self.hub, self.journal.audit, self.recorder)

    def complete(self, status: wire.Status) -> None:
        """Add what the engine leaves to this process: its rank, the health, and the sentence."""
        status.engine = self.rank
        status.health = self.health()
        status.fragmentation.sentence = situation(status)
