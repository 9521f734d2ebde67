"""The health of the API, part by part: engine, frames, audit log, flight recorder.

Operators must see a failure before an incident: a recorder that has stopped has nothing on it.
"""

from __future__ import annotations

import time

from vtoken import wire
from vtoken_api.fanout.hub import Hub
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.recorder import Recorder

STALE_FRAME_S = 10.0  # a followed engine sends a frame at least every IDLE_STATE_S


def health(hub: Hub, audit: AuditLog, recorder: Recorder) -> list[wire.Health]:
    """The health of one engine, and of what is kept of it."""
    return [_engine(hub), _frames(hub, recorder), _audit(audit), _recorder(recorder)]


def _engine(hub: Hub) -> wire.Health:
    detail = "running" if hub.alive else "stopped"
    status = None if hub.view is None else hub.view.status
    if hub.alive and status is not None and status.scheduling != "running":
        detail = "running; scheduling is paused"
    return wire.Health(name="engine", ok=hub.alive, detail=detail)


def _frames(hub: Hub, recorder: Recorder) -> wire.Health:
    age_s = hub.view_age_s
    if age_s is None:
        return wire.Health(name="frames", ok=True, detail="none yet")
    followed = hub.wants_state or recorder.recording
    detail = f"the newest is {age_s:.1f} s old" + ("" if followed else "; no subscribers")
    ok = age_s <= STALE_FRAME_S or not followed
    since = None if ok else time.time() - age_s
    return wire.Health(name="frames", ok=ok, detail=detail, since_ts=since)


def _audit(audit: AuditLog) -> wire.Health:
    if not audit.error:
        return wire.Health(name="audit", ok=True, detail="written to disk")
    detail = f"entries are kept in memory only, until this process ends: {audit.error}"
    return wire.Health(name="audit", ok=False, detail=detail, since_ts=audit.error_ts)


def _recorder(recorder: Recorder) -> wire.Health:
    if recorder.recording:
        return wire.Health(name="recorder", ok=True, detail="recording")
    if recorder.problem:
        detail = f"stopped: {recorder.problem}"
        return wire.Health(name="recorder", ok=False, detail=detail, since_ts=recorder.stopped_ts)
    return wire.Health(name="recorder", ok=True, detail="starting")
