"""Converts text for ASCII-only terminals, one ASCII character for each character.

The width never changes, so layouts still fit.
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
    """`text` in ASCII, character by character; unmapped characters become question marks."""
    if text.isascii():
        return text
    return text.translate(_TABLE).encode("ascii", "replace").decode("ascii")
