"""What is wrong with the engines of the fleet page as a whole."""

from __future__ import annotations

from vtoken.sentences import counted
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, width_of, wrap


class FleetSentence(LinesWidget):
    """What is wrong with the engines as a whole, the worst first, as many as fit."""

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        fleet = view.fleet
        if fleet is None:
            return []
        if not fleet.findings:
            answering = sum(row.status is not None for row in fleet.rows)
            if answering < len(fleet.rows):
                return [((" Connecting …", palette.MUTED_STYLE),)]
            same = ", all answer and run the same configuration."
            return [((f" {counted(len(fleet.rows), 'engine')}{same}", palette.GOOD_STYLE),)]
        spans, muted = list[Span](), palette.MUTED_STYLE
        for finding in fleet.findings:
            style = palette.BAD_STYLE if finding.fault == "silent" else palette.WARN_STYLE
            sentence = finding.text
            if sentence.startswith("engine"):  # not the name of a server
                sentence = sentence[:1].upper() + sentence[1:]
            more: list[Span] = [(f" {sentence}.", style)]
            if finding.changed and not view.read_only_requested:
                actions = ("sync-engines", "undo-engine")[: 1 + (len(finding.changed) == 1)]
                for key in map(view.key_of, actions):
                    more += [(f" {key.shown}", palette.KEY_STYLE), (f" {key.label}", muted)]
            if spans and width_of(spans) + width_of(more) > width * height - 8 * height:
                break
            spans += more
        return wrap(spans, width, height)
