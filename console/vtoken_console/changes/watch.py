"""Alerts about later outcomes of changes and about failing parts of the server.

The engine may revert or keep a change, another client may supersede it, or it may not be in force
in time. `poll` takes the newest model and returns the new alerts. Invariants:
1. an event causes one alert; events from before this console connected cause none
2. while a call of this console is in flight, nothing is reported: only its response tells which
   event it caused
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken_console.style.units import change_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.wire.reducer import StreamState

IN_FORCE_TIMEOUT_S = 3.0  # for an accepted change to be in force; longer only if the engine stalls


@dataclass(frozen=True, slots=True)
class Alert:
    """One message; a `sticky` one stays until the user dismisses it."""

    text: str
    sticky: bool


class ChangeWatch:
    """Tracks this console's own changes in the event stream."""

    def __init__(self) -> None:
        self.calls_in_flight = 0  # of this console
        self.num_changes = 0  # that this console made, or kept
        self.num_trials = 0
        self._epoch = ""
        self._since = 0.0
        self._last_seq = 0
        self._own: dict[int, set[str]] = {}  # revision -> fields
        self._pending: tuple[int, float] | None = None  # revision, monotonic time of acceptance

    def add_own(self, result: wire.PatchResult, monotonic: float) -> None:
        """Records an accepted change of this console."""
        self.num_changes += 1
        self.num_trials += result.trial is not None
        self._own[result.revision] = set(result.changes)
        self._pending = (result.revision, monotonic)

    def poll(self, model: StreamState, monotonic: float) -> list[Alert]:
        """Alerts about changes since the last call."""
        if model.hello is None or self.calls_in_flight:
            return []
        if model.epoch != self._epoch:
            self._epoch, self._since, self._last_seq = model.epoch, model.hello.ts, 0
            self._own, self._pending = {}, None
        alerts: list[Alert] = []
        for event in reversed(model.events):
            if event.seq <= self._last_seq or event.ts < self._since:
                break
            if event.kind == "config":
                alert = self._alert_for(event)
                if alert is not None:
                    alerts.append(alert)
        if model.events:
            self._last_seq = max(self._last_seq, model.events[-1].seq)
        late = self._check_pending(model, monotonic)
        return [*reversed(alerts), *([late] if late is not None else [])]

    def _alert_for(self, event: wire.Event) -> Alert | None:
        data = event.data
        revision = int(data.get("revision") or 0)
        changes = change_text(data.get("changes") or {})
        if "reverted" in data:
            reason = data.get("reason") or "its trial ended"
            text = (
                f"Reverted: revision {data['reverted']}, {reason}. Now {changes} (rev {revision})."
            )
            return Alert(text, sticky=True)
        if "kept" in data:
            text = f"Kept: revision {data['kept']}, {data.get('reason', '')}."
            return Alert(text, sticky=bool(data.get("unevaluated")))
        if revision in self._own:
            return None
        fields = set(data.get("changes") or {})
        overwritten = [own for own, own_fields in self._own.items() if own_fields & fields]
        superseded = data.get("overtaken")
        if superseded in self._own:
            text = f"Superseded: no step used your revision {superseded}; "
        elif overwritten:
            text = f"Superseded: your revision {max(overwritten)} is overridden; "
        else:
            return None
        for own in overwritten:
            self._own[own] -= fields
        return Alert(f"{text}{data.get('actor')} set {changes} (rev {revision}).", sticky=True)

    def _check_pending(self, model: StreamState, monotonic: float) -> Alert | None:
        """Alerts once if an accepted change is not in force in time."""
        if self._pending is None or model.config is None:
            return None
        revision, since = self._pending
        effective = model.config.effective_revision
        if model.config.revision < revision or monotonic - since < IN_FORCE_TIMEOUT_S:
            return None
        self._pending = None
        if effective == 0 or effective >= revision or model.config.revision > revision:
            return None
        text = (
            f"Deferred: revision {revision} is accepted and not in force; the engine's newest step "
            f"ran with revision {effective}."
        )
        return Alert(text, sticky=True)


class HealthWatch:
    """Tracks the server's parts: one alert when a part fails, one when it works again."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def poll(self, health: list[wire.Health]) -> list[Alert]:
        """Alerts about changes of health since the last call."""
        before, self._failing = self._failing, {part.name for part in health if not part.ok}
        alerts = []
        for part in health:
            if not part.ok and part.name not in before:
                alerts.append(Alert(f"The server's {part.name} FAILS: {part.detail}", sticky=True))
            elif part.ok and part.name in before:
                alerts.append(Alert(f"The server's {part.name} works again.", sticky=False))
        return alerts
