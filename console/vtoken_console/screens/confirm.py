"""The confirmation dialog of a change that one key would make. Cancel has the focus."""

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

    def __init__(
        self, question: list[Paragraph], why: str = "this cannot be undone", verb: str = "Apply"
    ) -> None:
        super().__init__()
        self._question, self._why, self._verb = question, why, verb

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm", classes="page") as page:
            page.border_title = self._why
            page.border_subtitle = "←→ choose   enter do it   esc cancel"
            yield Outcome(*self._question, id="question")
            with Horizontal(id="answers"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button(self._verb, id="proceed", compact=True, variant="warning")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "proceed")
