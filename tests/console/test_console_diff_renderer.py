"""Updates of changed columns only: fewer bytes, the same screen as Textual's own."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from vtoken_console.frame.cost import Cost, metered
from vtoken_console.style.diff_renderer import encode
from vtoken_console.style.palette import style
from vtoken_console.widgets.lines import changed_columns, merge

LOOKS = (
    Style(),
    Style(color="#d0d7de"),
    Style(color="#d0d7de", bgcolor="#161b22"),
    Style(bgcolor="#2f6fb5"),
    Style(color="#ff7b54", bgcolor="#161b22", bold=True),
    Style(color="#ff7b54", underline=True),
    Style(bold=True),
    Style(color="#ff7b54", bgcolor="#161b22", reverse=True),
)
SEGMENTS = st.lists(
    st.builds(Segment, st.sampled_from([" ", "  ", "a", "▂", "bc "]), st.sampled_from(LOOKS)),
    max_size=12,
)
SYSTEMS = st.sampled_from([ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])


def terminal(data: str) -> list[tuple[str, str, frozenset[str], str]]:
    """The cells of a terminal: character, colour (none for a blank), attributes, background."""
    cells = []
    ink = back = ""
    attributes: set[str] = set()
    for code, char in re.findall(r"\x1b\[([0-9;]*)m|(.)", data):
        if char:
            shown = "" if char == " " and not attributes & {"4", "7"} else ink
            cells.append((char, shown, frozenset(attributes), back))
            continue
        parts = code.split(";") if code else ["0"]
        while parts:
            head = parts.pop(0)
            if head in ("38", "48"):
                length = 4 if parts[0] == "2" else 2
                value = ";".join([head[1:], *parts[:length]])
                del parts[:length]
                ink, back = (value, back) if head == "38" else (ink, value)
            elif head == "0":
                ink = back = ""
                attributes.clear()
            elif head in ("1", "4", "7"):
                attributes.add(head)
            elif 30 <= int(head) <= 39 or 90 <= int(head) <= 97:
                ink = head
            else:
                back = head
    return cells


@given(SEGMENTS, SYSTEMS)
def test_short_encoding_shows_the_same_as_full_styles(
    segments: list[Segment], system: ColorSystem
) -> None:
    whole = "".join(
        f"\x1b[{Strip.render_ansi(s.style, system)}m{s.text}\x1b[0m" if s.style else s.text
        for s in segments
    )

    def terminal_cells(data: str) -> list[tuple[str, str, frozenset[str], str]]:
        bare = terminal(data)
        # Bold changes nothing on a blank.
        return [(c, i, a - {"1"} if c == " " else a, b) for c, i, a, b in bare]

    assert terminal_cells(encode(segments, system)) == terminal_cells(whole)
    assert len(encode(segments, system)) <= len(whole)


LINES = st.lists(
    st.tuples(
        st.sampled_from(["a", "bb", "a ", "cab"]),
        st.sampled_from([style("#111111"), style("#222222")]),
    ),
    max_size=6,
).map(merge)


@given(LINES, LINES)
def test_columns_outside_the_changed_ones_are_equal(a, b) -> None:  # type: ignore[no-untyped-def]
    def cells(line) -> list[tuple[str, Style]]:  # type: ignore[no-untyped-def]
        out = [(char, style) for text, style in line for char in text]
        return out + [(" ", Style())] * (40 - len(out))

    ranges = changed_columns(a, b, 40)
    changed = {column for first, last in ranges for column in range(first, last)}
    assert bool(ranges) == (cells(a) != cells(b))
    for column, (before, after) in enumerate(zip(cells(a), cells(b), strict=True)):
        assert column in changed or before == after


def test_written_bytes_are_those_that_reach_the_terminal() -> None:
    class Terminal:
        data = ""

        def write(self, data: str) -> None:
            self.data += data

    cost = Cost()
    screen = metered(Terminal, cost)()
    screen.write("plain")
    screen.write("▂●")
    assert screen.data == "plain▂●"
    assert cost.written_bytes == len("plain▂●".encode())
    assert screen.pending == 0


def test_rates_are_over_the_time_between_two_samples() -> None:
    cost = Cost()
    cost.sample(10.0)
    cost.written_bytes, cost.received_bytes, cost.drawn, cost.dropped = 500, 3000, 20, 2
    assert cost.sample(10.4).written_per_s == 0  # too soon for a new one
    sample = cost.sample(12.0)
    assert (sample.written_per_s, sample.received_per_s, sample.drawn_per_s) == (250, 1500, 10)
    assert (sample.dropped, sample.is_dropping) == (2, True)
    later = cost.sample(30.0)
    assert (later.dropped, later.is_dropping) == (2, False)  # long ago: nobody need act
    assert sample.rss_bytes > 1_000_000
