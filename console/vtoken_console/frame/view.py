"""The input of one frame: the newest model, the connection's state, the viewer's choices.

One View is built per frame and passed to every widget.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vtoken_console.feed.connection import Connection
from vtoken_console.frame.cost import NO_COST, CostSample
from vtoken_console.frame.filters import NO_FILTER, Filter
from vtoken_console.frame.keys import KEYS, Key
from vtoken_console.frame.silence import is_link_silent, is_overdue
from vtoken_console.style.ramp import Ramp
from vtoken_console.style.themes import Theme

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.activity import Activity
    from vtoken_console.feed.playhead import ReplayStatus
    from vtoken_console.feed.series import Series
    from vtoken_console.frame.fleet import FleetView
    from vtoken_console.frame.guide import Shown


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """`server_name`: one of several has a name; `now`: Unix seconds; `monotonic`: seconds;
    `age_s`: since the newest message.
    """

    url: str
    server_name: str
    connection: Connection
    now: float
    monotonic: float
    age_s: float
    ramp: Ramp
    theme: Theme
    ascii_only: bool
    read_only_requested: bool
    motion: bool = True  # whether movements are drawn
    filter: Filter = NO_FILTER
    activity: Activity | None = None  # None if `model` is
    model: StreamState | None = None  # None until the first snapshot
    series: Series | None = None
    audit: tuple[wire.AuditEntry, ...] = ()  # in a replay
    cost: CostSample = NO_COST
    keys: tuple[Key, ...] = KEYS
    replay: ReplayStatus | None = None  # None: a live server
    guide: Shown | None = None  # the step of the guided first minute; None: not running
    fleet: FleetView | None = None  # None: one engine
    frozen_ts: float = 0.0  # Unix seconds of a picture that stands still; 0: it moves

    @property
    def is_link_silent(self) -> bool:
        """Whether no message arrives on a live connection."""
        return self.replay is None and self.connection.is_live and is_link_silent(self.age_s)

    @property
    def engine_silent_s(self) -> float:
        """Seconds since the engine's last step while requests wait; 0 if steps are not overdue."""
        model = self.model
        status = model.status if model is not None else None
        if model is None or status is None:
            return 0.0
        idle = not (status.requests.running or status.requests.waiting)
        if idle or status.scheduling != "running":
            return 0.0
        silent_s = self.server_now - max(status.ts, model.step_ts)
        return silent_s if is_overdue(silent_s, model.hello) else 0.0

    @property
    def server_now(self) -> float:
        """Unix seconds by the server's clock."""
        return self.model.ts + self.age_s if self.model is not None else self.now

    def key_of(self, action: str) -> Key:
        """The key of an action, by the action's id."""
        return next(key for key in self.keys if key.id == action)

    def key(self, action: str) -> str:
        """The key of an action, as shown on the screen."""
        return self.key_of(action).shown

    @property
    def read_only_reason(self) -> str:
        """Why the controls are off; empty if they are on."""
        if self.replay is not None:
            return "this is a recording"
        if self.read_only_requested:
            return "this console was started with --read-only"
        hello = self.model.hello if self.model else None
        if hello is not None and not hello.can_control:
            return hello.read_only_reason or "the server grants this token reading only"
        return ""


def still(view: View) -> View:
    """The view whose data `frozen` shows for as long as the picture stands still."""
    return replace(view, series=deepcopy(view.series), frozen_ts=view.now)


def frozen(picture: View, newest: View) -> View:
    """The data of `picture` with the viewer's choices and the connection of `newest`.

    Movements are not drawn: `Activity` goes on.
    """
    return replace(
        newest,
        now=picture.now,
        monotonic=picture.monotonic,
        age_s=picture.age_s,
        model=picture.model,
        series=picture.series,
        frozen_ts=picture.frozen_ts,
        motion=False,
    )
