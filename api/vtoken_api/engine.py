"""One engine of this server, as the API sees it, and the health of that, part by part.

Operators must see a failure before an incident: a recorder that has stopped has nothing on it.
"""

from __future__ import annotations

import time

from vtoken import wire
from vtoken.sentences.advice import put_into_words
from vtoken_api.fanout.hub import Hub
from vtoken_api.state.journal import Journal
from vtoken_api.state.peaks import Peaks

STALE_FRAME_S = 10.0  # a followed engine sends a frame at least every IDLE_STATE_S


class Engine:
    """What this process has of it: the hub of its stream, and its flight recording."""

    def __init__(self, hub: Hub, journal: Journal) -> None:
        self.rank = hub.rank
        self.hub = hub
        self.flight = journal.flights[hub.rank]
        self._audit_log = journal.audit
        self._peaks = Peaks()
        hub.complete = self.complete

    def health(self) -> list[wire.Health]:
        """The health of the engine and of what is kept of it."""
        return [self._engine(), self._frames(), self._audit(), self._recorder()]

    def complete(self, status: wire.Status) -> None:
        """Add what the engine leaves to this process: its rank, health, peaks, and the words."""
        state = self.hub.state
        status.engine = self.rank
        status.peaks = self._peaks.after(status)
        status.health = self.health()
        put_into_words(status, None if state is None else state.config)

    # ------------------------------------------------------------ parts

    def _engine(self) -> wire.Health:
        hub = self.hub
        detail = "running" if hub.alive else "stopped"
        status = None if hub.state is None else hub.state.status
        if hub.alive and status is not None and status.scheduling != "running":
            detail = "running; scheduling is paused"
        return wire.Health(name="engine", ok=hub.alive, detail=detail)

    def _frames(self) -> wire.Health:
        age_s = self.hub.state_age_s
        if age_s is None:
            return wire.Health(name="frames", ok=True, detail="none yet")
        followed = self.hub.wants_state or self.flight.recording
        detail = f"the newest is {age_s:.1f} s old" + ("" if followed else "; no subscribers")
        ok = age_s <= STALE_FRAME_S or not followed
        since = None if ok else time.time() - age_s
        return wire.Health(name="frames", ok=ok, detail=detail, since_ts=since)

    def _audit(self) -> wire.Health:
        audit = self._audit_log
        if not audit.error:
            return wire.Health(name="audit", ok=True, detail="written to disk")
        detail = f"entries are kept in memory only, until this process ends: {audit.error}"
        return wire.Health(name="audit", ok=False, detail=detail, since_ts=audit.error_ts)

    def _recorder(self) -> wire.Health:
        flight = self.flight
        if flight.recording:
            return wire.Health(name="recorder", ok=True, detail="recording")
        if flight.problem:
            detail = f"stopped: {flight.problem}"
            return wire.Health(name="recorder", ok=False, detail=detail, since_ts=flight.stopped_ts)
        return wire.Health(name="recorder", ok=True, detail="starting")
