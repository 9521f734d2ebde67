"""The dialog that selects the export format."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

CHOICES = (
    ("s", "svg", "scalable image"),
    ("p", "png", "image"),
    ("c", "csv", "tables: blocks, requests, series"),
    ("j", "json", "the server's documents, all blocks"),
)


class ExportScreen(ModalScreen[str | None]):
    """Returns svg, png, csv, json, or None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,x", "dismiss(None)", show=False),
        *(Binding(key, f"dismiss('{kind}')", show=False) for key, kind, _ in CHOICES),
    ]

    def compose(self) -> ComposeResult:
        options = OptionList(
            *(
                Option(f"[b $vt-key]{key}[/]  [b]{kind.upper():<6}[/][$vt-muted]{text}[/]", id=kind)
                for key, kind, text in CHOICES
            ),
            id="export",
            classes="page",
        )
        options.border_title = "export what is on the screen"
        options.border_subtitle = "esc cancel"
        yield options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)
