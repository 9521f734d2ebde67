"""The text of one request as a recording holds it, at the moment that is shown.

Its tokens and blocks are asked of a running server, so they are not here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from vtoken.recording import RecordingError
from vtoken_console.frame.view import View
from vtoken_console.look import units
from vtoken_console.screens.request import Summary
from vtoken_console.widgets.details.text_panel import TextPanel
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.header import Header
from vtoken_console.widgets.keybar import key_spans
from vtoken_console.widgets.lines import Line, LinesWidget, cut, merge
from vtoken_console.widgets.replay_bar import ReplayBar

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.feed.replay import Replay

REFRESH_S = 0.25
KEYS = (
    ("arrows", "move"),
    ("tab", "time"),
    ("space", "pause"),
    ("[ ]", "5 s"),
    ("esc", "back"),
    ("?", "help"),
    ("q", "quit"),
)


class RecordedTextKeys(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        return [merge(cut(key_spans(KEYS), width))]


class RecordedTextScreen(Screen[None]):
    """Follows the replay: after a jump it shows the text of that moment."""

    AUTO_FOCUS = "#text"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-narrow"),
        (100, "-middle"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("t", "tokens", show=False),
    ]

    def __init__(self, replay: Replay, request_id: str) -> None:
        super().__init__()
        self._replay = replay
        self._request_id = request_id
        self._loading = False
        self._shown: wire.TextLine | None = None

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield Summary()
        yield TextPanel(id="text")
        yield ReplayBar(id="replay")
        yield RecordedTextKeys(id="keys")

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._ask)
        self._ask()
        self.add_class("-composed")

    def show(self, view: View) -> None:
        for widget in self.query(LinesWidget):
            widget.show(view)

    def _ask(self) -> None:
        if not self._loading:  # a long text in a large file takes longer than the pause
            self._loading = True
            self.run_worker(self._load())

    async def _load(self) -> None:
        try:
            await self._read()
        finally:
            self._loading = False

    async def _read(self) -> None:
        summary, panel = self.query_one(Summary), self.query_one(TextPanel)
        row = self._replay.feed.model.requests.get(self._request_id)
        summary.problem = "" if row else "At this moment there is no such request."
        summary.detail, summary.step = row or summary.detail, self._replay.feed.model.step
        summary.redraw()
        try:
            line = await self._replay.text(self._request_id)
        except RecordingError as error:
            panel.show_problem(str(error))
            return
        if line is None:
            self._shown = None
            panel.show_problem(
                "Up to this moment the recording holds no text of this request.",
                "The recorder reads it every few seconds: a later moment may have it.",
            )
        elif line is not self._shown:
            self._shown = line
            self._show_text(line, "" if row is None else row.policy)

    def _show_text(self, line: wire.TextLine, policy: str) -> None:
        import numpy as np

        from vtoken_console.feed import tokens

        page = line.page
        scores = [math.nan if row.score is None else row.score for row in page.rows]
        live = np.array([row.live for row in page.rows], bool)
        self.query_one(TextPanel).show_text(
            page.rows,
            page.shadow,
            num_prompt=page.prompt_tokens,
            policy=policy,
            scores=scores,
            ranks=tokens.score_ranks(live, np.array(scores, np.float32)).tolist(),
            read_at=f"read at {units.clock(line.ts)}, step {page.step:,}",
        )

    def on_token_moved(self, event: TokenMoved) -> None:
        panel = self.query_one(TextPanel)
        panel.follow_from(event.token)
        panel.go(event.token)

    def action_tokens(self) -> None:
        said = "Tokens and blocks are asked of a running server: a recording does not hold them."
        self.query_one(Summary).say(said, is_error=True)

    def action_leave(self) -> None:
        self.dismiss()
