"""The dialog that selects the export format."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget

CHOICES = (
    ("s", "svg", "scalable image"),
    ("p", "png", "image"),
    ("c", "csv", "tables: blocks, requests, series"),
    ("j", "json", "the server's documents, all blocks"),
)


class Choices(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        self.set_titles("export what is on the screen", "esc cancel")
        return [
            EMPTY,
            *(
                (
                    (f"  {key}  ", palette.KEY_STYLE),
                    (f"{kind.upper():<6}", palette.BOLD_STYLE),
                    (text, palette.MUTED_STYLE),
                )
                for key, kind, text in CHOICES
            ),
        ]


class ExportScreen(ModalScreen[str | None]):
    """Returns svg, png, csv, json, or None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,x", "dismiss(None)", show=False),
        *(Binding(key, f"dismiss('{kind}')", show=False) for key, kind, _ in CHOICES),
    ]

    def compose(self) -> ComposeResult:
        yield Choices(id="export", classes="page")
