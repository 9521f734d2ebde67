"""The last line of the fleet page: its keys."""

from __future__ import annotations

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, merge, width_of


class FleetKeys(LinesWidget):
    SHOWN = ("open-engine", "sort-engines", "filter-engines", "fleet", "help", "quit")
    MORE = ("retry", "export", "theme")  # where there is room

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        keys = {key.id: key for key in view.keys}
        for number in range(len(self.MORE), -1, -1):
            names = (*self.SHOWN[:-2], *self.MORE[:number], *self.SHOWN[-2:])
            spans: list[Span] = []
            for key in (keys[name] for name in names):
                label = "back" if key.id == "fleet" else key.label
                spans += [(f" {key.shown}", palette.KEY_STYLE), (f" {label} ", palette.MUTED_STYLE)]
            if width_of(spans) <= width:
                break
        return [merge(cut(spans, width))]
