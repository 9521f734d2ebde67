"""What the terminal shows, so that an update sends only the cells that differ.

Textual resends a changed region from its widget's left edge, and a full style for every segment
(https://github.com/Textualize/textual/issues/5625). Over a slow link that costs more than the
change itself. A driver passes what it writes through `Terminal.changes`. Invariant: after every
write, the terminal shows the same as after the write that Textual asked for.
"""

from __future__ import annotations

import re
import select
import sys
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import get_character_cell_size
from rich.color import Color, ColorSystem
from textual.driver import Driver

RESET = "\x1b[0m"
GAP = 4  # unchanged cells in the present style that are cheaper to resend than to skip
_MOVE = re.compile(r"\x1b\[(\d+);(\d+)H")
_PARTS = re.compile(
    r"\x1b\[([\d;]*)m([^\x00-\x1f\x7f]*)\x1b\[0m|([^\x00-\x1f\x7f]+)|([\x00-\x1f\x7f])"
)
_INVISIBLE = frozenset({"1", "3"})  # attributes that change nothing on a blank: bold, italic


@dataclass(frozen=True, slots=True)
class Look:
    """The SGR parameters of a cell's attributes, ink and background; empty: the terminal's own."""

    attributes: str
    ink: str
    back: str


_look = lru_cache(maxsize=None)(Look)  # equal looks are one object
PLAIN = _look("", "", "")


class Terminal:
    """The cells of one terminal. Widths and heights are in cells, places count from 0.

    `system`: the colours that it can show. `written_bytes`: since the start.
    """

    def __init__(self) -> None:
        self.system = ColorSystem.TRUECOLOR
        self.written_bytes = 0
        self._fileno: int | None = None
        self._size: tuple[int, int] | None = None  # None: not known yet
        self._rows: dict[int, tuple[list[str], list[Look | None]]] = {}  # None: unknown
        self._looks: dict[str, tuple[Look, Look]] = {}  # of text and of blanks
        self._narrow: set[str] = set(map(chr, range(0x20, 0x7F)))  # known to be one cell wide
        self._cursor = ""  # the move that ended the last update

    def driver_class(self, base: type[Driver]) -> type[Driver]:
        """Textual's driver `base`, whose output passes through `changes`."""
        terminal = self

        class TerminalDriver(base):  # type: ignore[misc, valid-type]
            def start_application_mode(self) -> None:
                terminal.attach(getattr(self, "fileno", None))
                super().start_application_mode()

            def write(self, data: str) -> None:
                if changes := terminal.changes(data):
                    super().write(changes)

        return TerminalDriver

    def attach(self, fileno: int | None) -> None:
        """Begins with an unknown screen, behind `fileno`."""
        self._fileno = fileno
        self.forget()

    def forget(self) -> None:
        """Forgets what is on the screen: the next updates are sent in full."""
        self._rows.clear()
        self._cursor = ""

    def resize(self, width: int, height: int) -> None:
        self._size = (width, height)
        self.forget()

    def set_colors(self, system: ColorSystem) -> None:
        self.system = system
        self._looks.clear()
        self.forget()

    @property
    def is_behind(self) -> bool:
        """Whether the terminal, or the link to it, has not yet taken what was written."""
        if self._fileno is None or sys.platform == "win32":
            return False
        return not select.select([], [self._fileno], [], 0)[1]

    def changes(self, data: str) -> str:
        """What to write instead of `data`, which Textual writes; may be empty."""
        # On Windows, Textual writes an update in pieces that begin anywhere.
        if sys.platform != "win32":
            data = self._changes(data)
        self.written_bytes += len(data) if data.isascii() else len(data.encode())
        return data

    def _changes(self, data: str) -> str:
        if _MOVE.match(data) is None:
            if not data.startswith("\x1b[?") or "1049" in data:
                self.forget()  # not a mode of the terminal, or its other screen
            return data
        _, *places = _MOVE.split(data)
        pen = _Pen()
        for y, x, text in zip(places[::3], places[1::3], places[2::3], strict=True):
            # A line break only precedes another move.
            self._draw(pen, int(y) - 1, int(x) - 1, text.removesuffix("\n"))
        pen.use(PLAIN)
        cursor = "" if places[-1] else f"\x1b[{places[-3]};{places[-2]}H"
        if not pen.out and cursor == self._cursor:
            return ""
        self._cursor = cursor
        return "".join(pen.out) + cursor

    def _draw(self, pen: _Pen, y: int, x: int, text: str) -> None:
        """Writes the cells in which `text`, at row y from column x on, differs from the screen."""
        if not text:
            return
        width, height = self._size or (x + len(text), y + 1)
        if y >= height or x >= width:
            return  # it was drawn for a larger terminal
        chars: list[str] = []
        looks: list[Look] = []
        for codes, styled, plain, control in _PARTS.findall(text):
            part = styled or plain
            if control or not self._is_narrow(part):
                self._draw_unknown(pen, y, x, text)
                return
            look, blank = self._looks.get(codes) or self._add_looks(codes)
            chars += part
            looks += [blank if part.isspace() else look] * len(part)
        del chars[width - x :], looks[width - x :]
        shown_chars, shown_looks = self._row(y, x + len(chars))
        last = x + len(chars)
        if shown_chars[x:last] == chars and shown_looks[x:last] == looks:
            return
        shown = zip(chars, shown_chars[x:last], looks, shown_looks[x:last], strict=True)
        for n, (char, old_char, look, old_look) in enumerate(shown):
            if char == old_char and look is old_look:
                continue
            gap = pen.columns_to(y, x + n)
            if 0 < gap <= min(GAP, n) and all(k == pen.look for k in looks[n - gap : n]):
                pen.put("".join(chars[n - gap : n]))
            else:
                pen.move(y, x + n)
            pen.use(look, is_blank=char == " ")
            pen.put(char)
        shown_chars[x:last], shown_looks[x:last] = chars, looks

    def _draw_unknown(self, pen: _Pen, y: int, x: int, text: str) -> None:
        """Writes `text` as it is: it has links, or characters that are not one cell wide."""
        pen.use(PLAIN)
        pen.move(y, x)
        pen.put_unmeasured(text)
        self._rows.pop(y, None)

    def _row(self, y: int, length: int) -> tuple[list[str], list[Look | None]]:
        """The cells of row y, at least `length`."""
        chars, looks = self._rows.setdefault(y, ([], []))
        missing = length - len(chars)
        if missing > 0:
            chars += [""] * missing
            looks += [None] * missing
        return chars, looks

    def _is_narrow(self, text: str) -> bool:
        """Whether every character is one cell wide."""
        if self._narrow.issuperset(text):
            return True
        self._narrow.update(char for char in text if get_character_cell_size(char) == 1)
        return self._narrow.issuperset(text)

    def _add_looks(self, codes: str) -> tuple[Look, Look]:
        """The look of text with the SGR parameters `codes`, and of blanks with them."""
        attributes: list[str] = []
        ink = back = ""
        parts = iter(codes.split(";") if codes else ())
        for part in parts:
            number = int(part or 0)
            if number in (38, 48):
                if next(parts) == "2":
                    color = Color.from_rgb(*(int(next(parts)) for _ in range(3)))
                else:
                    color = Color.from_ansi(int(next(parts)))
                value = ";".join(color.downgrade(self.system).get_ansi_codes(number == 38))
                ink, back = (value, back) if number == 38 else (ink, value)
            elif 30 <= number <= 39 or 90 <= number <= 97:
                ink = part
            elif 40 <= number <= 49 or 100 <= number <= 107:
                back = part
            else:
                attributes.append(part)
        look = blank = _look(";".join(attributes), ink, back)
        if _INVISIBLE.issuperset(attributes):
            blank = _look("", "", back)
        self._looks[codes] = look, blank
        return look, blank


class _Pen:
    """Collects an update; `look` is the terminal's present style."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.look = PLAIN
        self._y, self._x = -1, 0  # of the terminal's cursor; row -1: unknown

    def columns_to(self, y: int, x: int) -> int:
        """Columns from the cursor to a cell to its right on its row; else -1."""
        return max(-1, x - self._x) if y == self._y else -1

    def move(self, y: int, x: int) -> None:
        by = self.columns_to(y, x)
        if by:
            self.out.append(f"\x1b[{by}C" if by > 0 else f"\x1b[{y + 1};{x + 1}H")
        self._y, self._x = y, x

    def put(self, text: str) -> None:
        """Writes characters that are one cell wide."""
        self.out.append(text)
        self._x += len(text)

    def put_unmeasured(self, text: str) -> None:
        """Writes a text of unknown width that ends in the terminal's own style."""
        self.out.append(text)
        self._y = -1

    def use(self, look: Look, *, is_blank: bool = False) -> None:
        """Sets the style of the next characters. A blank without attributes shows no ink."""
        now = self.look
        if is_blank and not (look.attributes or look.ink or now.attributes):
            look = Look("", now.ink if look.back or not now.back else "", look.back)
        if look == now:
            return
        if look == PLAIN:
            self.out.append(RESET)
        elif (
            look.attributes != now.attributes
            or (now.ink and not look.ink)
            or (now.back and not look.back)
        ):
            parts = ("0" if now != PLAIN else "", look.attributes, look.ink, look.back)
            self.out.append(f"\x1b[{';'.join(filter(None, parts))}m")
        else:
            new = [new for old, new in ((now.ink, look.ink), (now.back, look.back)) if old != new]
            self.out.append(f"\x1b[{';'.join(new)}m")
        self.look = look
