"""The page of one block: owners, why it is pinned, slots and history."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from vtoken.client import ProblemError
from vtoken_console.widgets.details.block_page import BlockPage
from vtoken_console.widgets.outcome import problem_text

if TYPE_CHECKING:
    from vtoken_console.feed.session import Source

REFRESH_S = 0.5


class BlockScreen(ModalScreen[None]):
    """`open_owner` replaces this page with a request's page."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,Z,backspace,z", "dismiss", show=False),
        Binding("left", "go(-1)", show=False),
        Binding("right", "go(1)", show=False),
        Binding("enter", "owner", show=False),
    ]

    def __init__(
        self, source: Source, block_id: int, open_owner: Callable[[str], Awaitable[None]]
    ) -> None:
        super().__init__()
        self._open_owner = open_owner
        self._source = source
        self._page = BlockPage(block_id)

    def compose(self) -> ComposeResult:
        yield self._page

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._query)
        self._query()

    def _query(self) -> None:
        self.run_worker(self._load(self._page.block), exclusive=True)

    async def _load(self, block_id: int) -> None:
        try:
            self._page.detail = await self._source.rest.block(block_id)
            self._page.problem = ""
        except ProblemError as error:
            self._page.problem = problem_text(error.problem)
        self._page.redraw()

    def action_go(self, by: int) -> None:
        self._page.block = (self._page.block + by) % max(1, self._source.feed.model.num_blocks)
        self._page.redraw()
        self._query()

    async def action_owner(self) -> None:
        detail = self._page.detail
        if detail is not None and detail.owners:
            await self._open_owner(detail.owners[0].request_id)

    async def on_click(self, event: events.Click) -> None:
        if not self._page.region.contains(event.screen_x, event.screen_y):
            self.dismiss()
