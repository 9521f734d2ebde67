"""The keys of a replay: pause, speed, step, and where to go. They do nothing on a live server.

Knows the replay's controls, imported when there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from vtoken_console.app.base import Base
from vtoken_console.widgets.replay_bar import ReplayBar

if TYPE_CHECKING:
    from vtoken_console.feed.replay import Replay

SEEK_S = 5.0


class ReplayActions(Base):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "replay('toggle_pause')", show=False),
        Binding("less_than_sign", "replay('slower')", show=False),
        Binding("greater_than_sign", "replay('faster')", show=False),
        Binding("full_stop", "replay('step')", show=False),
        Binding("left_square_bracket", "replay('back')", show=False),
        Binding("right_square_bracket", "replay('on')", show=False),
    ]

    def _replay(self) -> Replay | None:
        if self.source is None or self.source.replay is None:
            return None
        from vtoken_console.feed.replay import Replay

        return self.source if isinstance(self.source, Replay) else None

    def action_replay(self, what: str) -> None:
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

    def on_replay_bar_typed(self, message: ReplayBar.Typed) -> None:
        replay = self._replay()
        if replay is not None:
            try:
                replay.seek_text(message.text)
            except ValueError as error:
                self.say(str(error), is_error=True)

    def on_replay_bar_sought(self, message: ReplayBar.Sought) -> None:
        replay = self._replay()
        if replay is not None:
            replay.seek(replay.index.first_ts + message.share * replay.index.duration_s)
