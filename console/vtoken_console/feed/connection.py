"""The state of the link to the server: an enum, one transition table, one frozen value.

Knows neither sockets nor widgets. A move outside TRANSITIONS raises IllegalTransition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    SYNCING = "syncing"  # the socket is open, the snapshot is under way
    LIVE = "live"
    LOST = "lost"  # waiting for the next try
    REFUSED = "refused"  # the server answered, and said no; waiting for the next try
    CLOSED = "closed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.CONNECTING, State.CLOSED}),
    State.CONNECTING: frozenset({State.SYNCING, State.LOST, State.REFUSED, State.CLOSED}),
    State.SYNCING: frozenset({State.LIVE, State.LOST, State.REFUSED, State.CLOSED}),
    State.LIVE: frozenset({State.LOST, State.CLOSED}),
    State.LOST: frozenset({State.CONNECTING, State.CLOSED}),
    State.REFUSED: frozenset({State.CONNECTING, State.CLOSED}),
    State.CLOSED: frozenset(),
}


class IllegalTransition(RuntimeError):  # noqa: N818 - named for what happened
    """A state was left for one that TRANSITIONS does not allow."""


@dataclass(frozen=True, slots=True)
class Connection:
    """`since`, `next_try`: Unix seconds. `failures`: tries that failed in a row."""

    state: State = State.IDLE
    since: float = 0.0
    failures: int = 0
    error: str = ""
    next_try: float | None = None
    ever_live: bool = False

    def to(
        self, state: State, now: float, *, error: str = "", next_try: float | None = None
    ) -> Connection:
        """The connection after a legal move to `state` at Unix time `now`."""
        if state not in TRANSITIONS[self.state]:
            allowed = ", ".join(sorted(s.value for s in TRANSITIONS[self.state])) or "nothing"
            raise IllegalTransition(
                f"from {self.state.value}: expected {allowed}; found {state.value}"
            )
        failed = state in (State.LOST, State.REFUSED)
        # `since` counts from the moment the data stopped, across all tries until it flows again.
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
