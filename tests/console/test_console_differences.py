"""What reaches the terminal: only cells that differ, and they show what Textual asked for."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import get_character_cell_size
from rich.color import Color, ColorSystem
from rich.segment import Segment
from rich.style import Style
from textual.drivers.headless_driver import HeadlessDriver
from textual.strip import Strip

from vtoken_console.frame.terminal import Terminal

WIDTH, HEIGHT = 14, 3
LOOKS = (
    None,
    Style(),
    Style(color="#d0d7de"),
    Style(color="#d0d7de", bgcolor="#161b22"),
    Style(color="#ff0000", bgcolor="#161b22"),
    Style(bgcolor="#2f6fb5"),
    Style(color="#ff7b54", bgcolor="#161b22", bold=True),
    Style(color="#ff7b54", underline=True),
    Style(bold=True),
    Style(color="#ff7b54", bgcolor="#161b22", reverse=True),
    Style(color="#ff7b54", link="https://example.org"),
    Style(color="red", bgcolor="bright_blue"),
)
SEGMENTS = st.builds(
    lambda text, style: Segment(text, style),
    st.sampled_from([" ", "  ", "a", "▂", "bc d", "中", "e\u0301", "xxxxx"]),
    st.sampled_from(LOOKS),
)
LINES = st.lists(SEGMENTS, min_size=1, max_size=5)
PARTS = st.tuples(st.integers(0, HEIGHT - 1), st.integers(0, WIDTH - 1), LINES)
UPDATES = st.lists(st.lists(PARTS, min_size=1, max_size=4), min_size=1, max_size=6)


def rendered(segments: list[Segment], width: int) -> str:
    """At most `width` cells, as Textual encodes them."""
    strip = Strip(segments).crop(0, width)
    return "".join(
        text if style is None else Strip.render_style(style, text, ColorSystem.TRUECOLOR)
        for text, style, _ in strip
    )


def update(parts: list[tuple[int, int, list[Segment]]]) -> str:
    """What Textual writes to draw `parts`, each at its row and column."""
    drawn = [f"\x1b[{y + 1};{x + 1}H{rendered(line, WIDTH - x)}" for y, x, line in parts]
    return "\n".join(drawn) + "\x1b[1;1H"


Cell = tuple[str, frozenset[str], str, str]
BLANK: Cell = (" ", frozenset(), "", "")


class Screen:
    """A terminal's cells: character, attributes, ink (none for a blank), background."""

    def __init__(self) -> None:
        stale = ("?", frozenset[str](), "", "")
        self.cells: dict[tuple[int, int], Cell] = {
            (y, x): stale for y in range(HEIGHT) for x in range(WIDTH)
        }
        self.attributes: frozenset[str] = frozenset()
        self.ink = self.back = ""

    def write(self, data: str) -> None:
        y = x = 0
        data = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\", "", data)
        for codes, kind, char in re.findall(r"\x1b\[([\d;]*)([HCm])|(.)", data):
            numbers = codes.split(";") if codes else ["0"]
            if kind == "H":
                y, x = int(numbers[0]) - 1, int(numbers[1]) - 1
            elif kind == "C":
                x += int(numbers[0])
            elif kind == "m":
                self._style(numbers)
            else:
                x += self._put(y, x, char)

    def _put(self, y: int, x: int, char: str) -> int:
        width = get_character_cell_size(char)
        if width == 0:
            head, *rest = self.cells.get((y, x - 1), BLANK)
            self.cells[y, x - 1] = (head + char, *rest)  # type: ignore[assignment]
            return 0
        attributes, ink = self.attributes, self.ink
        if char == " ":
            attributes -= {"1"}
            ink = ink if attributes & {"4", "7"} else ""
        if self.cells.get((y, x), BLANK)[0] == "":  # half of a wide character
            self.cells[y, x - 1] = BLANK
        if self.cells.get((y, x + width), BLANK)[0] == "":
            self.cells[y, x + width] = BLANK
        self.cells[y, x] = (char, attributes, ink, self.back)
        if width == 2:
            self.cells[y, x + 1] = ("", attributes, ink, self.back)
        return width

    def _style(self, parts: list[str]) -> None:
        while parts:
            head = parts.pop(0)
            if head in ("38", "48"):
                length = 4 if parts[0] == "2" else 2
                value = ";".join([head, *parts[:length]])
                del parts[:length]
                self.ink, self.back = (value, self.back) if head == "38" else (self.ink, value)
            elif head == "0":
                self.ink = self.back = ""
                self.attributes = frozenset()
            elif int(head) < 30:
                self.attributes |= {head}
            elif 30 <= int(head) <= 39 or 90 <= int(head) <= 97:
                self.ink = head
            else:
                self.back = head


@given(UPDATES)
def test_the_screen_is_the_one_that_textual_asked_for(
    updates: list[list[tuple[int, int, list[Segment]]]],
) -> None:
    terminal, ours, asked = Terminal(), Screen(), Screen()
    terminal.resize(WIDTH, HEIGHT)
    for parts in updates:
        whole = update(parts)
        asked.write(whole)
        ours.write(terminal.changes(whole))
        assert ours.cells == asked.cells
        assert (ours.ink, ours.back, ours.attributes) == ("", "", frozenset())


@given(UPDATES)
def test_a_repeated_update_writes_nothing(
    updates: list[list[tuple[int, int, list[Segment]]]],
) -> None:
    terminal = Terminal()
    terminal.resize(WIDTH, HEIGHT)
    for parts in updates:
        plain = [(y, x, [Segment("a b", s.style) for s in line]) for y, x, line in parts]
        rows = {
            y: (y, 0, [s for s in line if not (s.style and s.style.link)]) for y, _, line in plain
        }
        whole = update(list(rows.values()))
        terminal.changes(whole)
        assert terminal.changes(whole) == ""


def test_only_changed_cells_are_sent() -> None:
    terminal = Terminal()
    terminal.resize(80, 24)
    before = "\x1b[3;5H\x1b[38;2;1;2;3mfree 1,204 blocks\x1b[0m\x1b[1;1H"
    assert terminal.changes(before) == before
    after = terminal.changes(before.replace("1,204", "1,206"))
    assert after == "\x1b[3;14H\x1b[38;2;1;2;3m6\x1b[0m\x1b[1;1H"


def test_cells_beyond_the_edges_are_not_sent() -> None:
    terminal = Terminal()
    terminal.resize(4, 2)
    assert terminal.changes("\x1b[1;1Habcdef\n\x1b[3;1Hghi\x1b[1;1H") == "\x1b[1;1Habcd\x1b[1;1H"


@pytest.mark.parametrize("other", ["\x1b[?1049h", "\x1b]52;c;YQ==\x07", "anything"])
def test_after_other_output_the_screen_is_unknown(other: str) -> None:
    terminal = Terminal()
    line = "\x1b[1;1Habc\x1b[1;1H"
    assert terminal.changes(line) == line
    assert terminal.changes("\x1b[?2026h") == "\x1b[?2026h"  # a mode changes no cell
    assert terminal.changes(line) == ""
    assert terminal.changes(other) == other
    assert terminal.changes(line) == line
    terminal.resize(80, 24)
    assert terminal.changes(line) == line


@pytest.mark.parametrize("system", [ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])
def test_colours_are_those_that_the_terminal_can_show(system: ColorSystem) -> None:
    terminal = Terminal()
    terminal.set_colors(system)
    ink, back = Color.parse("#ff7b54"), Color.parse("#161b22")
    expected = [
        *ink.downgrade(system).get_ansi_codes(),
        *back.downgrade(system).get_ansi_codes(foreground=False),
    ]
    style = Style(color=ink.name, bgcolor=back.name)
    drawn = terminal.changes(f"\x1b[1;1H{rendered([Segment('x', style)], 1)}\x1b[1;1H")
    assert drawn == f"\x1b[1;1H\x1b[{';'.join(expected)}mx\x1b[0m\x1b[1;1H"


def test_written_bytes_are_those_that_reach_the_terminal() -> None:
    terminal, seen = Terminal(), []

    class Device(HeadlessDriver):
        def __init__(self) -> None:
            pass

        def write(self, data: str) -> None:
            seen.append(data)

    made: Any = terminal.driver_class(Device)
    driver = made()
    for text in ("plain", "▂●", "\x1b[1;1H▂\x1b[1;1H", "\x1b[1;1H▂\x1b[1;1H"):
        driver.write(text)
    assert terminal.written_bytes == len("".join(seen).encode())
    assert len(seen) == 3  # the last one changes nothing


def test_a_terminal_that_does_not_read_is_behind() -> None:
    terminal = Terminal()
    reader, writer = os.pipe()
    try:
        terminal.attach(writer)
        assert not terminal.is_behind
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, bytes(4096)):
                pass
        assert terminal.is_behind
        os.read(reader, 1 << 16)
        assert not terminal.is_behind
    finally:
        os.close(reader)
        os.close(writer)
