"""What the last action came to, or the whole of the server's refusal, until dismissed."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken_console import palette
from vtoken_console.view import View
from vtoken_console.widgets.lines import Line, LinesWidget

if TYPE_CHECKING:
    from vtoken import wire

SHOWN_S = 12.0
MAX_LINES = 5


@dataclass(frozen=True, slots=True)
class Note:
    """`until`: monotonic seconds; None stays until dismissed (refusals do)."""

    text: str
    is_error: bool = False
    until: float | None = None


def problem_text(problem: wire.Problem) -> str:
    """All that the server said: title, detail, field, value, bound."""
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
    """Takes no line while there is nothing to say."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.note: Note | None = None

    def say(self, note: Note | None) -> None:
        self.note = note
        self.display = note is not None
        if note is not None:
            width = max(20, self.app.size.width - 4)
            lines = textwrap.wrap(note.text, width)
            self.styles.height = max(1, min(MAX_LINES, len(lines)))
        self.redraw()

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if self.note is None:
            return []
        if self.note.until is not None and view.monotonic > self.note.until:
            self.say(None)
            return []
        look = palette.BAD_STYLE if self.note.is_error else palette.GOOD_STYLE
        glyph = "×" if self.note.is_error else "✓"
        lines = textwrap.wrap(self.note.text, max(20, width - 4))[:MAX_LINES]
        return [
            ((f" {glyph if n == 0 else ' '} ", look), (line, palette.TEXT_STYLE))
            for n, line in enumerate(lines)
        ]
