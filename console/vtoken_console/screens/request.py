"""The page of one request: tokens in logical order and token table, or its text.

All share one cursor. Of a recording it has the request's figures alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen

from vtoken.base.request_ids import short_id
from vtoken.client import ProblemError, RequestText
from vtoken.sentences import clock, state_text
from vtoken.sentences.request import given_words, gives, wait_words
from vtoken_console.feed import tokens
from vtoken_console.feed.tokens import NOWHERE
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.details.text_panel import TextPanel
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.details.token_rows import TokenRows
from vtoken_console.widgets.details.token_strip import TokenStrip
from vtoken_console.widgets.header import Header
from vtoken_console.widgets.keybar import Hint, KeyBar
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, facts, merge
from vtoken_console.widgets.outcome import problem_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.feed.session import Source
    from vtoken_console.feed.tokens import TokenTable

REFRESH_S = 1.0
PAGE_TOKENS = 2048
NOT_RECORDED = (
    "A recording has the figures of a request, not its words, its tokens and its blocks.",
    "They can be read on the page of a request while its server runs.",
)
# Responses of servers that do not show text, have none, or are older than the call.
NO_TEXT = (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND)


class Summary(LinesWidget):
    """Lines about the request, or why there is no newer state.

    First in words: its age and waits, and what it gave up under pressure in a line of its own. Then
    two lines of figures, of which a wide terminal needs one.
    """

    def __init__(self) -> None:
        super().__init__(id="summary")
        self.detail: wire.RequestRow | None = None
        self.problem = ""
        self.step = 0

    def set_detail(self, detail: wire.RequestRow | None, step: int) -> None:
        """Sets what is shown, as of `step`."""
        self.detail, self.step = detail, step
        self.set_class(detail is not None and bool(given_words(detail)), "-gives")
        self.redraw()

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        muted, text, d = palette.MUTED_STYLE, palette.TEXT_STYLE, self.detail
        problem: list[Span] = []
        if self.problem:
            shown = f"  Shown: step {self.step:,}." if self.step else ""
            problem = [(f" {self.problem}{shown}", palette.WARN_STYLE)]
        if d is None:
            return [((" request", muted),), merge(cut(problem, width))]
        given, wait = given_words(d, width - 1), wait_words(d, view.server_now)
        state = ", ".join(filter(None, [state_text(d), wait]))
        budget = f"{'floor' if gives(d) else 'budget'} {units.count(d.budget_tokens)}"
        head: list[Span] = [
            (f" {d.id if 3 * len(d.id) < width else short_id(d.id)}  ", palette.BOLD_STYLE),
            (state, text),
            (f"  {d.policy} {budget}", muted),
        ]
        tokens = _counts(
            ("prompt", d.prompt_tokens),
            ("out", d.output_tokens),
            ("live", d.live),
            ("dead", d.dead - d.parked_tokens),
        )
        tokens += _counts(("parked", d.parked_tokens)) if d.parked_tokens else []
        blocks = _counts(
            ("blocks", d.blocks), ("could be", d.bound_blocks), ("without vToken", d.naive_blocks)
        )
        work = _counts(("moved", d.moved_tokens))
        work += _counts(("preempted", d.preemptions)) if d.preemptions else []
        path: list[Span] = [(f"  {'dense' if d.dense else 'holes: packed for attention'}", muted)]
        lines = [head, *([[(f" {given}", text)]] if given else [])]
        if height - len(lines) > 1:
            lines += [[*tokens, *work], problem or [*blocks, *path]]
        else:
            lines.append(problem or [*tokens, *blocks, *path, *work])
        return [merge(cut(line, width)) for line in lines]


def _counts(*named: tuple[str, int]) -> list[Span]:
    """Names and counts of stable width."""
    return facts(*((f" {name} ", units.count(value, 5) + " ") for name, value in named))


class RequestScreen(Screen[None]):
    """`open_block` opens a block's page above this one; `compact` compacts a request, `restore`
    brings back what it has parked.
    """

    AUTO_FOCUS = "#strip"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", show=False),
        Binding("enter", "block", show=False),
        Binding("t", "text", show=False),
        Binding("c", "compact", show=False),
        Binding("R", "restore", show=False),
    ]

    def __init__(
        self,
        source: Source,
        request_id: str,
        open_block: Callable[[int], Awaitable[None]],
        compact: Callable[[str], None],
        restore: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._compact = compact
        self._restore = restore
        self._open_block = open_block
        self._source = source
        self._request_id = request_id
        self._loading = False
        self._next_load = 0.0
        self.token = 0
        self._summary = Summary()
        self._strip = TokenStrip(id="strip")
        self._rows = TokenRows(id="rows")
        self._panel = TextPanel(id="text")
        self._keys = KeyBar(self._hints, id="keys")
        self._text = RequestText(request_id)
        self._text_refused = False

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield self._summary
        with Container(id="request"):
            yield self._strip
            yield self._rows
        yield self._panel
        yield self._keys

    def _hints(self, view: View) -> list[Hint]:
        return [
            *([] if self._shows_text else [Hint("tab", "next panel", 8, "tab")]),
            *([] if view.replay is not None else self._of_tokens()),
            *([] if view.read_only_reason else self._of_changes()),
            Hint("esc", "back", 0, "escape"),
            Hint.of(view.key_of("help"), rank=7),
            Hint.of(view.key_of("quit")),
        ]

    def _of_tokens(self) -> list[Hint]:
        return [
            Hint("arrows", "move", 9),
            Hint("enter", "block", 1, "enter"),
            Hint("t", "tokens" if self._shows_text else "text", 1, "t"),
        ]

    def _of_changes(self) -> list[Hint]:
        detail = self._summary.detail
        has_parked = detail is not None and detail.parked_tokens > 0
        return [
            Hint("c", "compact this", 2, "c", control=True),
            *([Hint("R", "restore", 1, "R", control=True)] if has_parked else []),
        ]

    def on_mount(self) -> None:
        self._rows.border_title = "token table"
        hello = self._source.feed.model.hello
        if self._source.replay is not None:
            self.add_class("-text")
            self._panel.show_problem(*NOT_RECORDED)
            self._panel.focus()
        elif hello is not None and hello.can_read_text:
            self.action_text()
        self.set_interval(REFRESH_S, self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        if self._source.replay is not None:
            self._show_recorded()
            return
        # Long requests are refreshed less often: loading takes at most a fifth of the time.
        if not self._loading and time.monotonic() >= self._next_load:
            self._loading = True
            self.run_worker(self._load())

    def _show_recorded(self) -> None:
        """Shows the request's row at this moment of the recording."""
        model, summary = self._source.feed.model, self._summary
        row = model.requests.get(self._request_id)
        summary.problem = "" if row is not None else "At this moment it does not run."
        summary.set_detail(row or summary.detail, model.step)

    async def _load(self) -> None:
        summary, rest, began = self._summary, self._source.rest, time.monotonic()
        try:
            detail = await rest.request(self._request_id)
            if detail.state == "finished":
                ended = "" if detail.ended_ts is None else f" at {clock(detail.ended_ts)}"
                summary.problem = f"This request has finished{ended}."
                summary.set_detail(detail, summary.step)
                return
            pages: list[wire.TokenPage] = []
            start, total = 0, 1
            while start < total:
                page = await rest.tokens(self._request_id, start, PAGE_TOKENS)
                pages.append(page)
                total, start = page.total, start + max(1, len(page.rows))
                if not page.rows:
                    break
            if self._shows_text and not self._text_refused:
                await self._read_text(detail)
        except ProblemError as error:
            finished = error.problem.status == HTTPStatus.NOT_FOUND
            text = "This request has finished." if finished else problem_text(error.problem)
            summary.problem = text
            summary.redraw()
            return
        finally:
            self._loading = False
            self._next_load = time.monotonic() + 4 * (time.monotonic() - began)
        table = await asyncio.to_thread(tokens.from_pages, pages)
        if not self.is_attached:
            return  # the page was closed meanwhile
        summary.problem = ""
        summary.set_detail(detail, table.step)
        strip = self._strip
        strip.table = table
        strip.num_prompt = detail.prompt_tokens
        config = self._source.feed.model.config
        if config is not None and config.effective.policy.name == detail.policy:
            strip.num_sinks = int(config.effective.policy.params.get("sinks", 0))
        self._rows.table = table
        if self._shows_text and not self._text_refused:
            self._show_text(detail, table)
        self._place(self.token)

    async def _read_text(self, detail: wire.RequestDetail) -> None:
        config = self._source.feed.model.config
        try:
            revision = 0 if config is None else config.revision
            restored, parked = detail.restored_tokens, detail.parked_tokens
            await self._source.rest.refresh_text(
                self._text, detail.dead, revision, restored, parked
            )
        except ProblemError as error:
            problem = error.problem
            if problem.status not in NO_TEXT or problem.field == "request_id":
                raise  # the connection is lost, or the request has finished
            self._text_refused = True  # until the user requests it again
            remedy = f"Requires {problem.bound}." if problem.bound else ""
            self._panel.show_problem(f"No text: {problem.detail}.", remedy)

    def _show_text(self, detail: wire.RequestDetail, table: TokenTable) -> None:
        panel = self._panel
        panel.show_text(
            self._text.tokens[: len(table)],  # the table was read earlier
            self._text.shadow,
            num_prompt=self._text.num_prompt,
            policy=detail.policy,
            scores=table.score.tolist(),
            ranks=tokens.score_ranks(table.live, table.score).tolist(),
        )
        if panel.follows:
            self.token = panel.cursor

    @property
    def _shows_text(self) -> bool:
        return self.has_class("-text")

    def _place(self, token: int) -> None:
        table = self._strip.table
        if table is None or not len(table):
            return
        self.token = max(0, min(token, len(table) - 1))
        self._strip.go(self.token)
        self._rows.go(self.token)
        self._panel.go(self.token)
        self._summary.redraw()

    def on_token_moved(self, event: TokenMoved) -> None:
        self._panel.follow_from(event.token)
        self._place(event.token)

    async def action_block(self) -> None:
        """Opens the page of the block that has the token under the cursor."""
        table = self._strip.table
        block = NOWHERE if table is None or not len(table) else int(table.block[self.token])
        if block != NOWHERE:
            await self._open_block(block)

    def action_text(self) -> None:
        """Switches between the text and the tokens and blocks."""
        if self._source.replay is not None:
            return
        self._text_refused = False
        self.toggle_class("-text")
        self._keys.redraw()
        self.query_one("#text" if self._shows_text else "#strip").focus()
        self._next_load = 0.0
        self._refresh()

    def action_compact(self) -> None:
        self._compact(self._request_id)

    def action_restore(self) -> None:
        self._restore(self._request_id)
