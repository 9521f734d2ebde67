"""The recorded text of one request at the replay's position.

Recordings hold no tokens and blocks: these are queried from a running server.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from vtoken.recording import RecordingError
from vtoken.sentences import clock
from vtoken_console.feed import tokens
from vtoken_console.frame.view import View
from vtoken_console.screens.request import Summary
from vtoken_console.widgets.details.text_panel import TextPanel
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.header import Header
from vtoken_console.widgets.keybar import Hint, KeyBar
from vtoken_console.widgets.replay_bar import ReplayBar

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.feed.replay import Replay

REFRESH_S = 0.25


def _hints(view: View) -> list[Hint]:
    return [
        ("arrows", "move", 9),
        ("tab", "time", 1),
        ("space", "pause", 1),
        ("[ ]", "5 s", 1),
        ("esc", "back", 0),
        (view.key("help"), "help", 7),
        (view.key("quit"), "quit", 0),
    ]


class RecordedTextScreen(Screen[None]):
    """Follows the replay: after a seek it shows the text of that moment."""

    AUTO_FOCUS = "#text"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", show=False),
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
        yield KeyBar(_hints, id="keys")

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        if not self._loading:  # a long text in a large file takes longer than REFRESH_S
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
        summary.problem = "" if row else "No such request at this moment."
        summary.set_detail(row or summary.detail, self._replay.feed.model.step)
        try:
            line = await self._replay.text(self._request_id)
        except RecordingError as error:
            panel.show_problem(str(error))
            return
        if line is None:
            self._shown = None
            panel.show_problem(
                "The recording holds no text of this request up to this moment.",
                "The recorder reads text every few seconds: seek to a later moment.",
            )
        elif line is not self._shown:
            self._shown = line
            self._show_text(line, "" if row is None else row.policy)

    def _show_text(self, line: wire.TextLine, policy: str) -> None:
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
            read_at=f"read at {clock(line.ts)}, step {page.step:,}",
        )

    def on_token_moved(self, event: TokenMoved) -> None:
        panel = self.query_one(TextPanel)
        panel.follow_from(event.token)
        panel.go(event.token)

    def action_tokens(self) -> None:
        text = "Recordings hold no tokens and blocks: these are read from a running server."
        self.notify(text, severity="error")
