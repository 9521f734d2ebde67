"""The slot zoom: one block, slot by slot, with its owners and why it may not be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from vtoken.client import ProblemError
from vtoken_console import palette
from vtoken_console.view import View
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, merge
from vtoken_console.widgets.notice import problem_text

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken import wire
    from vtoken_console.client import Client

REFRESH_S = 0.5
CELL = 16
PINNED = {
    "shared prefix": "pinned: shared prefix, written by nobody",
    "hashed": "pinned: in the prefix cache, never written",
    "in flight": "pinned: source or destination of a move under way",
    "none": "not pinned: may be compacted",
}


class Slots(LinesWidget):
    """The slots of one block, as many a line as fit."""

    def __init__(self) -> None:
        super().__init__(id="slots", classes="page")
        self.detail: wire.BlockDetail | None = None
        self.problem = ""

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
        if self.problem:
            return [EMPTY, ((" " + self.problem, palette.BAD_STYLE),)]
        detail = self.detail
        if detail is None:
            return [EMPTY, ((" asking the server …", muted),)]
        size = len(detail.slots)
        lines: list[Line] = [
            (
                (f" {detail.live:>{len(str(size))}}/{size} live", palette.BOLD_STYLE),
                (f"   held by {detail.ref_cnt}   ", muted),
                (PINNED.get(detail.pinned, detail.pinned) if detail.ref_cnt else "free", text),
            ),
            EMPTY,
        ]
        if detail.owners:
            lines.append(((" owner                      live   place in its block table", muted),))
        lines += [
            ((f" {o.request_id:<26.26}{o.live:>5}   {o.index}", text),) for o in detail.owners
        ]
        lines += [EMPTY, ((" slot by slot: offset, state, token", muted),)]
        per_line = max(1, (width - 2) // CELL)
        while per_line > 1 and per_line & (per_line - 1):
            per_line -= 1
        for first in range(0, size, per_line):
            spans: list[Span] = [(" ", text)]
            for slot in detail.slots[first : first + per_line]:
                spans += self._slot(slot, view)
            lines.append(merge(spans))
        return lines

    def _slot(self, slot: wire.BlockSlot, view: View) -> list[Span]:
        looks: dict[str, tuple[str, Style]] = {
            "live": ("█", palette.style(palette.BAR)),
            "dead": ("x" if view.ascii_only else "░", palette.WARN_STYLE),
            "free": ("·", palette.FAINT_STYLE),
        }
        glyph, look = looks[slot.state]
        token = f"{slot.token_id:>6}" if slot.token_id is not None else " " * 6
        ink = palette.TEXT_STYLE if slot.state == "live" else palette.FAINT_STYLE
        return [
            (f"{slot.offset:>3} ", palette.FAINT_STYLE),
            (glyph * 2, look),
            (f"{token} {'dead' if slot.state == 'dead' else ''}".ljust(CELL - 6), ink),
        ]


class BlockScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,Z,backspace,z", "dismiss", show=False),
        Binding("left", "go(-1)", show=False),
        Binding("right", "go(1)", show=False),
        Binding("enter", "owner", show=False),
    ]

    def __init__(self, client: Client, block_id: int) -> None:
        super().__init__()
        self._client = client
        self._block_id = block_id
        self._slots = Slots()

    def compose(self) -> ComposeResult:
        yield self._slots

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._ask)
        self._ask()
        self.add_class("-composed")

    def show(self, view: View) -> None:
        self._slots.show(view)

    def _ask(self) -> None:
        keys = "left/right next block   enter open owner   esc close"
        self._slots.entitle(f"block {self._block_id:,}", keys)
        self.run_worker(self._load(self._block_id), exclusive=True)

    async def _load(self, block_id: int) -> None:
        try:
            self._slots.detail = await self._client.rest.block(block_id)
            self._slots.problem = ""
        except ProblemError as error:
            self._slots.problem = problem_text(error.problem)
        self._slots.redraw()

    def action_go(self, by: int) -> None:
        self._block_id = (self._block_id + by) % max(1, self._client.model.num_blocks)
        self._ask()

    async def action_owner(self) -> None:
        from vtoken_console.screens.request import RequestScreen

        detail = self._slots.detail
        if detail is not None and detail.owners:
            await self.app.switch_screen(RequestScreen(self._client, detail.owners[0].request_id))
