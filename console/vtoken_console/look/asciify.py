"""Text for terminals that show ASCII only: every character becomes one ASCII character.

Knows no widget. Width never changes, so a layout made for the full set still fits.
"""

from __future__ import annotations

_TABLE = str.maketrans(
    {
        "–": "-", "—": "-", "…": "~", "·": ".", "›": ">", "●": "*", "○": "o", "◐": "o",
        "×": "x", "✓": "+", "→": ">", "←": "<", "θ": "T", "µ": "u", "█": "#", "▓": "+",
        "░": ".", "▒": ":", "▂": "_", "▆": "#", "─": "-", "│": "|", "▲": "^", "▼": "v", "»": ">",
        "━": "=", "■": "#", "‖": '"', "►": ">", "↵": "$", "□": "_",
        "“": '"', "”": '"', "−": "-", "≤": "<",
    }
)  # fmt: skip


def asciify(text: str) -> str:
    """`text` in ASCII, character for character; what has no likeness becomes a question mark."""
    if text.isascii():
        return text
    return text.translate(_TABLE).encode("ascii", "replace").decode("ascii")
