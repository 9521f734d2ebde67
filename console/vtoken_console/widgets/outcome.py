"""Wrapped paragraphs: the what-if or outcome of a change, or the server's refusal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from vtoken_console.frame.view import View
from vtoken_console.style.palette import Paragraph
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget

if TYPE_CHECKING:
    from vtoken import wire


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


class Outcome(LinesWidget):
    """Paragraphs, wrapped to the width."""

    def __init__(self, *paragraphs: Paragraph, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.paragraphs = list(paragraphs)

    @property
    def text(self) -> str:
        return "\n".join(text for text, _ in self.paragraphs)

    def set_paragraphs(self, *paragraphs: Paragraph) -> None:
        self.paragraphs = list(paragraphs)
        self.redraw()

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        lines: list[Line] = []
        for text, style in self.paragraphs:
            if not text:
                lines.append(EMPTY)
            lines += [((" " + line, style),) for line in textwrap.wrap(text, max(10, width - 2))]
        if len(lines) > height > 0:
            text, style = "".join(part for part, _ in lines[height - 1]), lines[height - 1][0][1]
            lines[height - 1] = ((f"{text[: width - 2]} …", style),)
        return lines
