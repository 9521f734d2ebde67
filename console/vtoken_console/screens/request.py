"""One request: its tokens in logical order, its blocks, its token table; one cursor in all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen

from vtoken.client import ProblemError
from vtoken_console.frame.view import View
from vtoken_console.look import palette, units
from vtoken_console.widgets.details.block_table import BlockTable
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.details.token_rows import TokenRows
from vtoken_console.widgets.details.token_strip import TokenStrip
from vtoken_console.widgets.header import Header
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, merge
from vtoken_console.widgets.notice import SHOWN_S, problem_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.feed.source import Source

REFRESH_S = 1.0
PAGE_TOKENS = 2048
KEYS = (
    ("tab", "next panel"),
    ("arrows", "move"),
    ("enter", "block"),
    ("c", "compact this"),
    ("esc", "back"),
    ("?", "help"),
    ("q", "quit"),
)


class Summary(LinesWidget):
    """Two lines about the request, or why there is nothing newer."""

    def __init__(self) -> None:
        super().__init__(id="summary")
        self.detail: wire.RequestDetail | None = None
        self.problem = ""
        self.said: Span = ("", palette.TEXT_STYLE)  # what the last action came to
        self.said_until = 0.0
        self.step = 0

    def say(self, text: str, *, is_error: bool = False) -> None:
        """In the place of the figures, for as long as a message stands."""
        self.said = (text, palette.WARN_STYLE if is_error else palette.GOOD_STYLE)
        self.said_until = time.monotonic() + SHOWN_S
        self.redraw()

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        muted, bold, d = palette.MUTED_STYLE, palette.BOLD_STYLE, self.detail
        second: list[Span] = []
        if self.problem:
            picture = "" if d is None else f"  The picture is of step {self.step:,}."
            text = f" {self.problem}{picture}"
            second = [(text, palette.WARN_STYLE)]
        elif view.monotonic < self.said_until:
            second = [(f" {self.said[0]}", self.said[1])]
        if d is None:
            return [((" request", muted),), merge(cut(second, width))]
        who: list[Span] = [(f" {d.id}  ", bold), (f"{d.state}  ", muted)]
        rules: list[Span] = [(f" {d.policy} budget {units.count(d.budget_tokens)}", muted)]
        living = _figures(("live", d.live), ("dead", d.dead))
        come = _figures(("prompt", d.prompt_tokens), ("out", d.output_tokens))
        blocks = _figures(("held", d.blocks), ("bound", d.bound_blocks), ("naive", d.naive_blocks))
        work = _figures(
            ("moved", d.moved_tokens), ("recycled", d.recycled_slots), ("preempted", d.preemptions)
        )
        path = "dense: stock attention path" if d.dense else "holes: packed before attention"
        path = path if height < 3 else path.partition(":")[0]
        way: list[Span] = [(f"  {path}", muted)]
        if height > 2:
            lines = [[*who, *rules], [*living, *blocks], second or [*come, *work, *way]]
        else:
            lines = [[*who, *living, *come, *rules], second or [*blocks, *work, *way]]
        return [merge(cut(line, width)) for line in lines]


def _figures(*named: tuple[str, int]) -> list[Span]:
    """Names and counts that do not jump in width."""
    spans: list[Span] = []
    for name, value in named:
        spans += [
            (f" {name} ", palette.MUTED_STYLE),
            (units.count(value, 5) + " ", palette.BOLD_STYLE),
        ]
    return spans


class RequestKeys(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        keys = [(key, label) for key, label in KEYS if key != "c" or not view.read_only_reason]
        for droppable in ("arrows", "tab", "?"):
            if sum(len(key) + len(label) + 3 for key, label in keys) > width:
                keys = [(key, label) for key, label in keys if key != droppable]
        spans: list[Span] = []
        for key, label in keys:
            spans += [(f" {key}", palette.KEY_STYLE), (f" {label} ", palette.MUTED_STYLE)]
        return [merge(cut(spans, width))]


class RequestScreen(Screen[None]):
    """`open_block` shows a block's page above this one."""

    AUTO_FOCUS = "#strip"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-narrow"),
        (100, "-middle"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("enter", "block", show=False),
        Binding("c", "compact", show=False),
    ]

    def __init__(
        self,
        source: Source,
        request_id: str,
        open_block: Callable[[int], Awaitable[None]],
        *,
        read_only: bool,
    ) -> None:
        super().__init__()
        self._read_only = read_only
        self._open_block = open_block
        self._source = source
        self._request_id = request_id
        self._loading = False
        self._next_load = 0.0
        self.token = 0

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield Summary()
        with Container(id="request"):
            with Container(id="request-left"):
                yield TokenStrip(id="strip")
                yield BlockTable(id="table")
            yield TokenRows(id="rows")
        yield RequestKeys(id="keys")

    def on_mount(self) -> None:
        self.query_one("#rows").border_title = "token table"
        self.set_interval(REFRESH_S, self._ask)
        self._ask()
        self.add_class("-composed")

    def show(self, view: View) -> None:
        for widget in self.query(LinesWidget):
            widget.show(view)

    def _ask(self) -> None:
        # A long request is asked for less often: loading takes at most a fifth of the time.
        if not self._loading and time.monotonic() >= self._next_load:
            self._loading = True
            self.run_worker(self._load())

    async def _load(self) -> None:
        from vtoken_console.feed import tokens

        summary, rest, began = self.query_one(Summary), self._source.rest, time.monotonic()
        try:
            detail = await rest.request(self._request_id)
            pages: list[wire.TokenPage] = []
            start, total = 0, 1
            while start < total:
                page = await rest.tokens(self._request_id, start, PAGE_TOKENS)
                pages.append(page)
                total, start = page.total, start + max(1, len(page.rows))
                if not page.rows:
                    break
        except ProblemError as error:
            gone = error.problem.status == 404
            summary.problem = "This request has finished." if gone else problem_text(error.problem)
            summary.redraw()
            return
        finally:
            self._loading = False
            self._next_load = time.monotonic() + 4 * (time.monotonic() - began)
        table = await asyncio.to_thread(tokens.from_pages, pages)
        if not self.query(TokenStrip):
            return  # left meanwhile
        summary.detail, summary.problem, summary.step = detail, "", table.step
        strip, blocks = self.query_one(TokenStrip), self.query_one(BlockTable)
        strip.table, blocks.detail = table, detail
        strip.num_prompt = detail.prompt_tokens
        blocks.block_size = self._source.feed.model.block_size
        config = self._source.feed.model.config
        if config is not None and config.effective.policy.name == detail.policy:
            strip.num_sinks = int(config.effective.policy.params.get("sinks", 0))
        self.query_one(TokenRows).table = table
        self._place(self.token)

    def _place(self, token: int) -> None:
        table = self.query_one(TokenStrip).table
        if table is None or not len(table):
            return
        self.token = max(0, min(token, len(table) - 1))
        blocks = self.query_one(BlockTable)
        blocks.table, blocks.token = table, self.token
        self.query_one(TokenStrip).go(self.token)
        self.query_one(TokenRows).go(self.token)
        blocks.redraw()
        self.query_one(Summary).redraw()

    def on_token_moved(self, event: TokenMoved) -> None:
        self._place(event.token)

    def on_block_table_moved(self, event: BlockTable.Moved) -> None:
        table = self.query_one(TokenStrip).table
        token = table.first_in_block(event.block) if table is not None else None
        if token is not None:
            self._place(token)

    async def action_block(self) -> None:
        block = self.query_one(BlockTable).block
        if block is not None:
            await self._open_block(block)

    def action_compact(self) -> None:
        self.run_worker(self._compact(), group="control")

    async def _compact(self) -> None:
        from vtoken_console.changes import controls

        summary = self.query_one(Summary)
        hello = self._source.feed.model.hello
        if hello is None or not hello.can_control or self._read_only:
            summary.say("Not done: this console is read-only. Nothing was sent.", is_error=True)
            return
        try:
            summary.say(await controls.compact(self._source.rest, request_id=self._request_id))
        except ProblemError as error:
            summary.say(problem_text(error.problem), is_error=True)

    def action_leave(self) -> None:
        self.dismiss()
