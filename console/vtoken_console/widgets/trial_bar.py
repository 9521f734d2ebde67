"""The change on trial: actor, changes, remaining time, guards, and the keys that end it.

Hidden while nothing is on trial.
"""

from __future__ import annotations

from vtoken_console.changes.trials import guards_text, remaining_text
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.units import change_text
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, merge, spread, width_of

SHORT_BELOW = 110  # columns; below, the remaining time is abbreviated


class TrialBar(LinesWidget):
    """One line, or two if the guards do not fit beside the keys: they will end the trial."""

    def show(self, view: View) -> None:
        config = view.model.config if view.model else None
        self.display = config is not None and config.trial is not None
        if self.display:
            width = self.size.width
            self.set_class(sum(map(width_of, self._parts(view, width)[:3])) > width > 0, "-two")
        super().show(view)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        left, guards, right, change = self._parts(view, width)
        if height > 1:
            room = width - width_of(left) - width_of(right) - 1
            first = spread([*left, *cut(change, room)], right, width, palette.TEXT_STYLE)
            return [first, merge(cut(guards, width))]
        left += guards
        left += cut(change, room) if (room := width - width_of([*left, *right]) - 1) > 12 else []
        return [spread(left, right, width, palette.TEXT_STYLE)]

    @staticmethod
    def _parts(view: View, width: int) -> tuple[list[Span], list[Span], list[Span], list[Span]]:
        """Time left, guards, keys, and what is on trial."""
        config = view.model.config if view.model else None
        trial = config.trial if config else None
        if trial is None or view.model is None:
            return [], [], [], []
        text, warn = palette.TEXT_STYLE, palette.WARN_STYLE
        remaining = remaining_text(trial, view.server_now, short=width < SHORT_BELOW)
        left: list[Span] = [
            (" ON TRIAL ", palette.style("#000000", palette.WARN, bold=True)),
            (f" {remaining}", warn),
        ]
        keys: list[Span] = []
        if not view.read_only_reason:
            for action, label in (("confirm", "keep"), ("undo", "revert")):
                keys.append((f" {view.key(action)}", palette.KEY_STYLE))
                keys.append((f" {label} ", palette.MUTED_STYLE))
        guards = guards_text(view.model.status)
        change = f"  rev {trial.revision} by {trial.actor}: {change_text(trial.changes)}"
        return left, [(f"  {guards}", text)] if guards else [], keys, [(change, text)]
