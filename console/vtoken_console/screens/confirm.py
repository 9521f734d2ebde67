"""The confirmation dialog of an irreversible change. It names the host; Cancel has the focus."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button

from vtoken_console.style.palette import Paragraph
from vtoken_console.widgets.outcome import Outcome


class ConfirmScreen(ModalScreen[bool]):
    """Returns whether to proceed: True from the second button only."""

    AUTO_FOCUS = "#cancel"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(False)", show=False),
        Binding("left,up", "app.focus_previous", show=False),
        Binding("right,down", "app.focus_next", show=False),
    ]

    def __init__(self, question: list[Paragraph]) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm", classes="page") as page:
            page.border_title = "this cannot be undone"
            page.border_subtitle = "←→ choose   enter do it   esc cancel"
            yield Outcome(*self._question, id="question")
            with Horizontal(id="answers"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Apply", id="proceed", compact=True, variant="warning")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "proceed")
