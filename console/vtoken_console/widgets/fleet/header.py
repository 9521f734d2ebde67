"""Line one of the fleet page: how many engines on which servers, and how many answer."""

from __future__ import annotations

from vtoken.sentences import counted
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, spread


class FleetHeader(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        muted, text, fleet = palette.MUTED_STYLE, palette.TEXT_STYLE, view.fleet
        if fleet is None:
            return []
        number, silent = len(fleet.rows), fleet.num_silent
        starting = sum(row.condition == "starting" for row in fleet.rows)
        where = counted(fleet.num_servers, "server")
        if fleet.num_servers == 1:
            where = fleet.rows[0].server.label
        left: list[Span] = [
            (" vToken ", palette.BOLD_STYLE),
            (" ", text),
            (counted(number, "engine"), text),
            (f" {'on' if fleet.num_servers > 1 else '@'} {where}", muted),
        ]
        right: list[Span] = []
        if view.read_only_requested:
            right += [(" read-only ", palette.style("#000000", palette.WARN)), (" ", text)]
        if starting:
            right.append((f"○ {starting} connecting  ", muted))
        if silent:
            right.append((f"× {silent} silent  ", palette.BAD_STYLE))
        live = number - silent - starting
        right.append((f"● {live} live ", palette.GOOD_STYLE if live else muted))
        return [spread(left, right, width, text)]
