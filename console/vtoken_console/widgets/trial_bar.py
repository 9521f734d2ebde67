"""The change on trial: actor, changes, remaining time, guards, and the keys that end it.

Hidden while nothing is on trial.
"""

from __future__ import annotations

from vtoken_console.changes.trials import guards_text, remaining_text
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.units import change_text
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, spread, width_of

SHORT_BELOW = 110  # columns; below, the remaining time is abbreviated


class TrialBar(LinesWidget):
    def show(self, view: View) -> None:
        config = view.model.config if view.model else None
        self.display = config is not None and config.trial is not None
        super().show(view)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        config = view.model.config if view.model else None
        trial = config.trial if config else None
        if trial is None or view.model is None:
            return []
        text, muted = palette.TEXT_STYLE, palette.MUTED_STYLE
        left: list[Span] = [
            (" ON TRIAL ", palette.style("#000000", palette.WARN, bold=True)),
            (
                f" {remaining_text(trial, view.server_now, short=width < SHORT_BELOW)}",
                palette.WARN_STYLE,
            ),
        ]
        guards = guards_text(view.model.status)
        right: list[Span] = []
        if not view.read_only_reason:
            for action, label in (("confirm", "keep"), ("undo", "revert")):
                right += [(f" {view.key(action)}", palette.KEY_STYLE), (f" {label} ", muted)]
        parts = [f"rev {trial.revision} by {trial.actor}: {change_text(trial.changes)}", guards]
        for part in parts:
            room = width - width_of(left) - width_of(right) - 2
            if part and room > 12:
                left += cut([(f"  {part}", text)], room)
        return [spread(left, right, width, text)]
