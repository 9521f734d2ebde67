"""The screen until the first data: address, since when, attempts, error and advice."""

from __future__ import annotations

import textwrap

from vtoken.sentences import clock
from vtoken_console.feed.connection import State
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.figures.sentence import waiting_text
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget


class Waiting(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        connection = view.connection
        muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
        body: list[Line] = [(("Connecting to ", muted), (view.url, palette.BOLD_STYLE)), EMPTY]
        if connection.since:
            ago = units.duration(view.now - connection.since)
            when = f"{clock(connection.since)}, {ago} ago"
            body.append((("since     ", muted), (when, text)))
        if connection.failures:
            times = "once" if connection.failures == 1 else f"{connection.failures:,} times"
            body.append((("tried     ", muted), (times, text)))
        for n, part in enumerate(textwrap.wrap(connection.error, max(20, width - 12))):
            head = ("" if n else "answer").ljust(10)
            body.append(((head, muted), (part, palette.WARN_STYLE)))
        status = waiting_text(connection, view.now)
        if status:
            body.append((("now       ", muted), (status, text)))
        if connection.failures:
            body += [EMPTY, *_advice(view)]
        inner = max(sum(len(t) for t, _ in line) for line in body)
        pad = " " * max(1, (width - inner) // 2)
        top = max(0, (height - len(body)) // 3)
        return [EMPTY] * top + [((pad, text), *line) for line in body]


def _advice(view: View) -> list[Line]:
    muted, text, key = palette.MUTED_STYLE, palette.TEXT_STYLE, palette.KEY_STYLE
    lines: list[Line] = []
    error = view.connection.error
    if error.startswith("401"):
        lines.append((("token     ", muted), ("export VTOKEN_TOKEN=…", text)))
    elif view.connection.state is not State.REFUSED or error.startswith("404"):
        lines.append(
            (
                ("start one ", muted),
                ("vtoken serve MODEL", text),
                ("   or   ", muted),
                ("make demo", text),
            )
        )
        lines.append((("elsewhere ", muted), ("vtoken console --url http://HOST:PORT", text)))
    lines += [
        EMPTY,
        (
            ("r", key),
            (" try now   ", muted),
            ("?", key),
            (" help   ", muted),
            ("q", key),
            (" quit", muted),
        ),
    ]
    return lines
