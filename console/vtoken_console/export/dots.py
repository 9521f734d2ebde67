"""Replaces braille characters of an exported SVG with drawn dots.

Few monospaced fonts have braille glyphs, and a fallback font's wider glyphs shift the text.
"""

from __future__ import annotations

import html
import re

LETTER_PX = 20.0  # Rich's distance from a line's top to its baseline
LINE_PX = 1.22 * LETTER_PX
DOT_PX = 3.6
# (column, line) of each bit's dot.
_PLACES = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
_TEXT = re.compile(
    r'<text class="(?P<style>[^"]+)" x="(?P<x>[^"]+)" y="(?P<y>[^"]+)" textLength="(?P<px>[^"]+)"'
    r"(?P<rest>[^>]*)>(?P<text>[^<]*[\u2801-\u28ff][^<]*)</text>"
)


def with_dots(svg: str) -> str:
    """`svg` of Textual with a square for each dot of a braille character."""
    return _TEXT.sub(_drawn, svg)


def _drawn(match: re.Match[str]) -> str:
    text = html.unescape(match["text"])
    left, top = float(match["x"]), float(match["y"]) - LETTER_PX + 1.5
    width = float(match["px"]) / len(text)
    path = []
    for n, char in enumerate(text):
        bits = ord(char) - 0x2800
        if not 0 < bits < 0x100:
            continue
        for bit, (column, line) in enumerate(_PLACES):
            if bits >> bit & 1:
                x = left + (n + (column + 0.5) / 2) * width - DOT_PX / 2
                y = top + (line + 0.5) / 4 * LINE_PX - DOT_PX / 2
                path.append(f"M{x:.1f} {y:.1f}h{DOT_PX}v{DOT_PX}h-{DOT_PX}z")
    rest = re.sub("[\u2801-\u28ff]", "\N{NO-BREAK SPACE}", match[0])
    return f'{rest}<path class="{match["style"]}" d="{"".join(path)}"/>'
