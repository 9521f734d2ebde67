"""Sends only changed columns to the terminal. The only module that uses Textual's internals.

Stock Textual sends a changed line from the widget's left edge, with a full style for every segment.
Over a slow connection both cost more than the change itself.
Invariant: after an update, the terminal shows the same as after Textual's own update.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, Compositor
from textual.app import App

RESET = "\x1b[0m"


@lru_cache(maxsize=8192)
def _codes(style: Style, system: ColorSystem) -> tuple[str, str, str]:
    """The SGR parameters of attributes, colour and background of `style`."""
    plain = Style(
        bold=style.bold,
        dim=style.dim,
        italic=style.italic,
        underline=style.underline,
        blink=style.blink,
        reverse=style.reverse,
        strike=style.strike,
    )
    attributes = plain._make_ansi_codes(system)
    ink = style.color.downgrade(system).get_ansi_codes() if style.color else ()
    back = style.bgcolor.downgrade(system).get_ansi_codes(False) if style.bgcolor else ()
    return attributes, ";".join(ink), ";".join(back)


def encode(segments: Iterable[Segment], system: ColorSystem) -> str:
    """Text with SGR sequences for the differences to the previous segment; a reset at the end.

    A blank shows no foreground colour, so it keeps the previous one.
    """
    out: list[str] = []
    now: tuple[str, str, str] = ("", "", "")
    for text, style, _ in segments:
        codes = ("", "", "") if style is None else _codes(style, system)
        if style is not None and style.link:
            out.append(RESET + style.render(text, color_system=system))
            now = ("", "", "")
            continue
        blank = not codes[0] and text.isspace()
        if blank:
            codes = (codes[0], now[1], codes[2])
        if codes != now:
            if codes[0] != now[0] or (now[1] and not codes[1]) or (now[2] and not codes[2]):
                if blank:
                    codes = (codes[0], "", codes[2])
                parts = [part for part in ("0" if any(now) else "", *codes) if part]
            else:
                parts = [new for old, new in zip(now, codes, strict=True) if new != old]
            out.append(f"\x1b[{';'.join(parts)}m")
            now = codes
        out.append(text)
    if any(now):
        out.append(RESET)
    return "".join(out)


class DiffUpdate(ChopsUpdate):
    """A partial update that starts at the first changed column."""

    def render_segments(self, console: Console) -> str:
        system = console._color_system or ColorSystem.TRUECOLOR
        out: list[str] = []
        for y, x1, x2 in self.spans:
            parts: list[Segment] = []
            start: int | None = None
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x >= x2 or end <= x1:
                    continue
                if start is None:
                    start = max(x, x1)
                inside = strip.crop(max(0, x1 - x), min(end, x2) - x)
                parts.extend(inside)
            if start is not None:
                out.append(f"\x1b[{y + 1};{start + 1}H{encode(parts, system)}")
        return "".join(out)


class DiffCompositor(Compositor):
    """Textual's compositor, whose partial updates hold the changed columns only."""

    def render_partial_update(self) -> DiffUpdate | None:
        update = super().render_partial_update()
        if update is None:
            return None
        return DiffUpdate(update.chops, update.spans, update.chop_ends)


def set_color_system(app: App[Any], system: ColorSystem) -> None:
    """Sets how many colours `app` sends to its terminal."""
    app.console._color_system = system
