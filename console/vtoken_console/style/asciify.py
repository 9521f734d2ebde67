"""Converts what is drawn for ASCII-only terminals, without a change of widths."""

from __future__ import annotations

from rich.cells import get_character_cell_size
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_TABLE = str.maketrans(
    {
        "–": "-", "—": "-", "…": "~", "·": ".", "›": ">", "●": "*", "○": "o", "◐": "o",
        "×": "x", "✓": "+", "→": ">", "←": "<", "θ": "T", "µ": "u", "█": "#", "▓": "+",
        "░": ".", "▒": ":", "▂": "_", "▆": "#", "─": "-", "│": "|", "▲": "^", "▼": "v", "»": ">",
        "«": "<", "━": "=", "┃": "#", "■": "#", "‖": '"', "►": ">", "↵": "$", "□": "_",
        "“": '"', "”": '"', "−": "-", "≤": "<",
    }
    | dict.fromkeys("╭╮╰╯┌┐└┘┏┓┗┛", "+") | dict.fromkeys("▁▃▄▅▇▔▌▐▊▎", " ")
)  # fmt: skip


def asciify(text: str) -> str:
    """`text` in ASCII; each character that the table lacks becomes as many question marks as it
    is wide.
    """
    if text.isascii():
        return text
    known = text.translate(_TABLE)
    return "".join(c if c.isascii() else "?" * get_character_cell_size(c) for c in known)


class AsciiFilter(LineFilter):
    """Converts the lines of all widgets, with their borders."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(asciify(text), style, control) for text, style, control in segments]
