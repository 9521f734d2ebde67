"""The replay bar: position, speed and marks of events. Typed digits are a moment to seek to.

Its keys are in the key bar.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from vtoken.sentences import clock
from vtoken_console.feed.playhead import ReplayStatus
from vtoken_console.feed.session import Session
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, merge, spread, width_of

MARK_STYLES = {"config": ("▲", palette.THETA_STYLE), "violation": ("×", palette.BAD_STYLE)}


def speed_text(speed: float) -> str:
    """Always five columns: 0.25x, 1x, 16x."""
    return f"{speed:g}x".rjust(5)


def span_text(seconds: float) -> str:
    """A position in the recording: 01:23, or 1:02:03."""
    total = max(0, int(seconds))
    text = f"{total // 60 % 60:02d}:{total % 60:02d}"
    return f"{total // 3600}:{text}" if total >= 3600 else text


class ReplayBar(LinesWidget, can_focus=True):
    """Hidden unless a recording is played (by CSS)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "app.replay('back')", show=False),
        Binding("right", "app.replay('on')", show=False),
        Binding("home", "app.replay('start')", show=False),
        Binding("end", "app.replay('end')", show=False),
    ]

    def __init__(self, session: Session, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._session = session
        self.typed = ""
        self._track = (0, 1)  # first column and width of the time axis

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        bar = view.replay
        if bar is None:
            return []
        muted, bold = palette.MUTED_STYLE, palette.BOLD_STYLE
        if self.typed:
            hint = "enter go   esc cancel   00:30 of it, HH:MM:SS, or seconds "
            typed = [(f" go to {self.typed}_", bold)]
            return [spread(typed, [(hint, muted)], width, palette.TEXT_STYLE)]
        glyph, word = (
            ("■", "end   ") if bar.at_end else ("‖", "paused") if bar.paused else ("►", "play  ")
        )
        left: list[Span] = [
            (f" {glyph} {word} ", palette.WARN_STYLE if bar.paused else palette.GOOD_STYLE),
            (clock(bar.ts) + " ", bold),
        ]
        total = span_text(bar.last_ts - bar.first_ts)
        place = span_text(bar.ts - bar.first_ts).rjust(len(total))
        more = " " if bar.indexed else "+"
        right: list[Span] = [
            (f" {place}/{total}{more}", muted),
            (f"{speed_text(bar.speed)} ", bold),
        ]
        left += cut(self._remark(bar), width // 2)
        room = max(1, width - width_of(left) - width_of(right))
        self._track = (width_of(left), room)
        return [merge([*left, *self._axis(bar, room), *right])]

    def _axis(self, bar: ReplayStatus, room: int) -> list[Span]:
        length = max(bar.last_ts - bar.first_ts, 1e-9)

        def column(ts: float) -> int:
            return max(0, min(room - 1, int((ts - bar.first_ts) / length * room)))

        here = column(bar.ts)
        done = palette.style(palette.BAR)
        spans: list[Span] = [
            ("━" if x < here else "─", done if x < here else palette.FAINT_STYLE)
            for x in range(room)
        ]
        for ts, kind, _ in bar.marks:
            if kind in MARK_STYLES and spans[column(ts)] != MARK_STYLES["violation"]:
                spans[column(ts)] = MARK_STYLES[kind]
        spans[here] = ("●", palette.BOLD_STYLE)
        return spans

    @staticmethod
    def _remark(bar: ReplayStatus) -> list[Span]:
        """What is wrong with the recording, else the newest mark of the last three seconds."""
        if bar.note:
            return [(f"{bar.note} ", palette.WARN_STYLE)]
        near = (text for ts, _, text in reversed(bar.marks) if 0 <= bar.ts - ts < 3)
        return [(f"{text} ", palette.THETA_STYLE) for text in near][:1]

    # ------------------------------------------------------------ typing and pointing

    def begin(self, digit: events.Key) -> None:
        """Takes the focus, and the first digit of a moment."""
        self.focus()
        self.on_key(digit)

    def on_key(self, event: events.Key) -> None:
        if event.character and (
            event.character.isdigit() or (self.typed and event.character in ":.")
        ):
            self.typed = (self.typed + event.character)[:12]
        elif self.typed and event.key == "backspace":
            self.typed = self.typed[:-1]
        elif self.typed and event.key == "escape":
            self.typed = ""
        elif self.typed and event.key == "enter":
            text, self.typed = self.typed, ""
            self._seek_text(text)
        else:
            return
        event.stop()
        event.prevent_default()
        self.redraw()

    def _seek_text(self, text: str) -> None:
        if self._session.replay is not None:
            try:
                self._session.replay.seek_text(text)
            except ValueError as error:
                self.notify(str(error), severity="error")

    def on_click(self, event: events.Click) -> None:
        (first, room), replay = self._track, self._session.replay
        if replay is not None and event.y == 0 and first <= event.x < first + room:
            share = (event.x - first) / max(1, room - 1)
            replay.seek(replay.index.first_ts + share * replay.index.duration_s)
