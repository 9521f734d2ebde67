"""Wrapped paragraphs: the what-if or outcome of a change, or the server's refusal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from textual.geometry import Size

from vtoken_console.frame.view import View
from vtoken_console.style.palette import Paragraph
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget

if TYPE_CHECKING:
    from vtoken import wire


def problem_text(problem: wire.Problem) -> str:
    """What the server refused and why; the detail names field, value and bound."""
    return problem.detail or f"{problem.status} {problem.title}"


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
        lines = self._wrapped(width)
        if len(lines) > height > 0:
            text, style = "".join(part for part, _ in lines[height - 1]), lines[height - 1][0][1]
            lines[height - 1] = ((f"{text[: width - 2]} …", style),)
        return lines

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._wrapped(width))

    def _wrapped(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for text, style in self.paragraphs:
            if not text:
                lines.append(EMPTY)
            lines += [((" " + line, style),) for line in textwrap.wrap(text, max(10, width - 2))]
        return lines
