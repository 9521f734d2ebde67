"""The keys of a replay: pause, speed, step, seek. They do nothing on a live server."""

from __future__ import annotations

from vtoken_console.app.session import Session
from vtoken_console.screens.dashboard import Dashboard

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

    def do(self, control: str) -> None:
        """Runs one of the controls of a replay by name."""
        replay = self._session.replay
        if replay is None:
            return
        match control:
            case "toggle_pause":
                replay.toggle_pause()
            case "slower" | "faster":
                replay.faster(1 if control == "faster" else -1)
            case "step":
                replay.step()
            case "back" | "on":
                replay.seek_by(SEEK_S if control == "on" else -SEEK_S)
            case "start" | "end":
                replay.seek(replay.index.last_ts if control == "end" else replay.index.first_ts)

    def seek_text(self, text: str) -> None:
        """Seeks to a typed moment."""
        replay = self._session.replay
        if replay is not None:
            try:
                replay.seek_text(text)
            except ValueError as error:
                self._dashboard.show_message(str(error), is_error=True)

    def seek_share(self, share: float) -> None:
        """Seeks to a share of the recording: 0 is its start, 1 its end."""
        replay = self._session.replay
        if replay is not None:
            replay.seek(replay.index.first_ts + share * replay.index.duration_s)
