"""The health of this API process, part by part: engine, frames, audit log, flight recorder.

Operators must see a failure before an incident: a recorder that has stopped has nothing on it.
"""

from __future__ import annotations

import time

from vtoken import wire
from vtoken_api.fanout.hub import Hub
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.flight_recorder import FlightRecorder

STALE_FRAME_S = 10.0  # a followed engine sends a frame at least every IDLE_STATE_S


def health(hub: Hub, audit: AuditLog, flight: FlightRecorder) -> list[wire.Health]:
    """The health of every part."""
    return [_engine(hub), _frames(hub, flight), _audit(audit), _recorder(flight)]


def _engine(hub: Hub) -> wire.Health:
    detail = "running" if hub.alive else "stopped"
    if hub.alive and hub.view is not None and hub.view.status.scheduling != "running":
        detail = "running; scheduling is paused"
    return wire.Health(name="engine", ok=hub.alive, detail=detail)


def _frames(hub: Hub, flight: FlightRecorder) -> wire.Health:
    age_s = hub.view_age_s
    if age_s is None:
        return wire.Health(name="frames", ok=True, detail="none yet")
    followed = hub.wants_state or flight.recording
    detail = f"the newest is {age_s:.1f} s old" + ("" if followed else "; no subscribers")
    ok = age_s <= STALE_FRAME_S or not followed
    since = None if ok else time.time() - age_s
    return wire.Health(name="frames", ok=ok, detail=detail, since_ts=since)


def _audit(audit: AuditLog) -> wire.Health:
    if not audit.error:
        return wire.Health(name="audit", ok=True, detail="written to disk")
    detail = f"entries are kept in memory only, until this process ends: {audit.error}"
    return wire.Health(name="audit", ok=False, detail=detail, since_ts=audit.error_ts)


def _recorder(flight: FlightRecorder) -> wire.Health:
    if flight.recording:
        return wire.Health(name="recorder", ok=True, detail="recording")
    if flight.problem:
        detail = f"stopped: {flight.problem}"
        return wire.Health(name="recorder", ok=False, detail=detail, since_ts=flight.stopped_ts)
    return wire.Health(name="recorder", ok=True, detail="starting")
