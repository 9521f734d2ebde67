"""The messages above the keys: results of actions, the server's refusals, alerts."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget

if TYPE_CHECKING:
    from vtoken import wire

SHOWN_S = 12.0
MAX_LINES = 5


@dataclass(frozen=True, slots=True)
class Note:
    """`until`: monotonic seconds; None: until dismissed or replaced.

    A `sticky` note is not replaced by later ones; it stays until dismissed.
    """

    text: str
    is_error: bool = False
    until: float | None = None
    sticky: bool = False


def problem_text(problem: wire.Problem) -> str:
    """All facts of a problem: status, title, detail, field, value, bound."""
    head = f"{problem.status} {problem.title}" if problem.status else problem.title
    text = f"{head}: {problem.detail}" if problem.detail else head
    facts = []
    if problem.field is not None:
        facts.append(f"field {problem.field}")
        facts.append(f"value {problem.value!r}")
    if problem.bound is not None:
        facts.append(f"bound {problem.bound}")
    return f"{text}  [{'; '.join(facts)}]" if facts else text


class Notice(LinesWidget):
    """Hidden while there are no notes."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.note: Note | None = None
        self.sticky: list[Note] = []  # oldest first

    def add(self, note: Note) -> None:
        """Adds a sticky note, or replaces the other note."""
        if note.sticky:
            self.sticky.append(note)
        else:
            self.note = note
        self._fit()

    def clear(self) -> None:
        """Removes all notes."""
        self.note, self.sticky = None, []
        self._fit()

    def _fit(self) -> None:
        width = max(20, self.app.size.width - 4)
        self.display = bool(self._notes)
        self.styles.height = max(1, len(self._lines_of(width)))
        self.redraw()

    @property
    def _notes(self) -> list[Note]:
        return [*self.sticky, *([self.note] if self.note is not None else [])]

    def _lines_of(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for note in reversed(self._notes):  # newest first, so that truncation drops the oldest
            style = palette.BAD_STYLE if note.is_error else palette.GOOD_STYLE
            glyph = "▼" if note.sticky else "×" if note.is_error else "✓"
            text = f"{note.text}  esc: seen" if note.sticky else note.text
            lines += [
                ((f" {glyph if n == 0 else ' '} ", style), (line, palette.TEXT_STYLE))
                for n, line in enumerate(textwrap.wrap(text, width))
            ]
        return lines[:MAX_LINES]

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        until = self.note.until if self.note is not None else None
        if until is not None and view.monotonic > until:
            self.note = None
            self._fit()
        return self._lines_of(max(20, width - 4))
