"""The keys of a replay: pause, speed, step, and where to go. They do nothing on a live server.

Knows the replay's controls, imported when there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_console.app.session import Session
from vtoken_console.screens.dashboard import Dashboard

if TYPE_CHECKING:
    from vtoken_console.feed.replay import Replay

SEEK_S = 5.0


class ReplayControls:
    KEYS = (
        ("space", "toggle_pause"),
        ("less_than_sign", "slower"),
        ("greater_than_sign", "faster"),
        ("full_stop", "step"),
        ("left_square_bracket", "back"),
        ("right_square_bracket", "on"),
    )

    def __init__(self, session: Session, dashboard: Dashboard) -> None:
        self._session = session
        self._dashboard = dashboard

    def _replay(self) -> Replay | None:
        source = self._session.source
        if source is None or source.replay is None:
            return None
        from vtoken_console.feed.replay import Replay

        return source if isinstance(source, Replay) else None

    def do(self, what: str) -> None:
        """One of the controls of a replay, by name."""
        replay = self._replay()
        if replay is None:
            return
        match what:
            case "toggle_pause":
                replay.toggle_pause()
            case "slower" | "faster":
                replay.faster(1 if what == "faster" else -1)
            case "step":
                replay.step()
            case "back" | "on":
                replay.seek_by(SEEK_S if what == "on" else -SEEK_S)
            case "start" | "end":
                replay.seek(replay.index.last_ts if what == "end" else replay.index.first_ts)

    def seek_text(self, text: str) -> None:
        """To the moment that was typed."""
        replay = self._replay()
        if replay is not None:
            try:
                replay.seek_text(text)
            except ValueError as error:
                self._dashboard.say(str(error), is_error=True)

    def seek_share(self, share: float) -> None:
        """To a point of the bar: 0 is the start of the recording, 1 its end."""
        replay = self._replay()
        if replay is not None:
            replay.seek(replay.index.first_ts + share * replay.index.duration_s)
