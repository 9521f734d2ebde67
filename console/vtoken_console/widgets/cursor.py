"""The base of panels with a cursor: its keys and the wheel."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from vtoken_console.widgets.lines import LinesWidget

WHEEL_ROWS = 3


class CursorWidget(LinesWidget, can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(0, -1)", show=False),
        Binding("down,j", "move(0, 1)", show=False),
        Binding("left", "move(-1, 0)", show=False),
        Binding("right", "move(1, 0)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "jump(0)", show=False),
        Binding("end", "jump(-1)", show=False),
    ]

    def action_move(self, dx: int, dy: int) -> None:
        """Moves the cursor by columns, or by rows."""
        raise NotImplementedError

    def action_page(self, by: int) -> None:
        self.action_move(0, by * self.content_size.height)

    def action_jump(self, to: int) -> None:
        """Moves the cursor to the first place (0) or the last one (-1)."""
        raise NotImplementedError

    def wheel_turned(self, by: int, event: events.MouseEvent) -> None:
        """`by`: 1 down, -1 up."""
        self.action_move(0, by * WHEEL_ROWS)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.wheel_turned(1, event)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.wheel_turned(-1, event)
