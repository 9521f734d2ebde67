"""The state of the connection to the server: an enum and a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    SYNCING = "syncing"  # the socket is open, the snapshot has not arrived
    LIVE = "live"
    LOST = "lost"  # waiting for the next attempt
    REFUSED = "refused"  # the server refused the stream; waiting for the next attempt
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Connection:
    """`since`, `next_try`: Unix seconds. `failures`: consecutive failed attempts."""

    state: State = State.IDLE
    since: float = 0.0
    failures: int = 0
    error: str = ""
    next_try: float | None = None
    ever_live: bool = False

    def to(
        self, state: State, now: float, *, error: str = "", next_try: float | None = None
    ) -> Connection:
        """The connection after a transition to `state` at Unix time `now`."""
        failed = state in (State.LOST, State.REFUSED)
        # `since` is when data stopped; it stays the same over all attempts until data flows again.
        restart = state is State.LIVE or self.state in (State.IDLE, State.LIVE)
        return replace(
            self,
            state=state,
            since=now if restart else self.since,
            failures=0 if state is State.LIVE else self.failures + failed,
            error="" if state is State.LIVE else (error or self.error),
            next_try=next_try if failed else None,
            ever_live=self.ever_live or state is State.LIVE,
        )

    @property
    def is_live(self) -> bool:
        return self.state is State.LIVE
