"""The service behind routes and stream: what their handlers may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vtoken_api.auth.check import AccessControl
from vtoken_api.changes import Changes
from vtoken_api.engine import Engine
from vtoken_api.fleet import Fleet
from vtoken_api.state.journal import Journal
from vtoken_api.text import RequestTexts


@dataclass(slots=True)
class Service:
    """One per server. `fleet` asks the engines; `engines`, by rank, have what is known of them."""

    fleet: Fleet
    engines: Mapping[int, Engine]
    auth: AccessControl
    journal: Journal
    texts: RequestTexts
    model_name: str  # as vLLM's metrics name it
    changes: Changes

    def engine(self, rank: int | None) -> Engine:
        """The engine of this rank; None: the only one. Raises 422."""
        return self.engines[self.fleet.one(rank).rank]
