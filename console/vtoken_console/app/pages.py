"""Opens what is under the cursor, and the pages above the dashboard: a request, a block, keys."""

from __future__ import annotations

from textual.app import App
from textual.screen import Screen

from vtoken_console.app.session import Session
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.widgets.events import Events
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.requests import Requests


class Pages:
    """Each page is imported when it is first opened."""

    def __init__(self, app: App[int], session: Session, dashboard: Dashboard) -> None:
        self._app = app
        self._session = session
        self._dashboard = dashboard

    async def zoom_in(self) -> None:
        self._dashboard.heatmap.focus()
        await self.zoom_step(slots=True)

    async def zoom_step(self, *, slots: bool) -> None:
        """Zooms in one level. The level after the last is a block's page, if `slots`."""
        heatmap = self._dashboard.heatmap
        if not heatmap.zoom_in() and slots:
            await self.open_block(heatmap.cursor)

    async def open_chosen(self) -> None:
        """Opens the page of the item under the focused panel's cursor."""
        focused = self._dashboard.focused
        if isinstance(focused, Heatmap):
            await self.zoom_in()
        elif isinstance(focused, Requests) and focused.chosen is not None:
            await self.open_request(focused.chosen.id)
        elif isinstance(focused, Events) and focused.chosen is not None:
            request_id = focused.chosen.data.get("request_id")
            if request_id:
                await self.open_request(str(request_id))

    async def open_request(self, request_id: str, *, in_place: bool = False) -> None:
        """Opens a request's page; in a recording with text, the page of the recorded text.

        `in_place`: replaces the top page.
        """
        from vtoken_console.screens.request import RequestScreen

        source, replay = self._session.source, self._session.replay
        if source is not None:
            page: Screen[None]
            if replay is not None and replay.holds_text:
                from vtoken_console.screens.recorded_text import RecordedTextScreen

                page = RecordedTextScreen(replay, request_id)
            else:
                page = RequestScreen(
                    source, request_id, self.open_block, read_only=self._session.read_only
                )
            if in_place:
                await self._app.switch_screen(page)
            else:
                await self._app.push_screen(page)

    async def open_block(self, block_id: int) -> None:
        from vtoken_console.screens.block import BlockScreen

        source = self._session.source
        if source is not None and source.feed.model.synced:
            await self._app.push_screen(BlockScreen(source, block_id, self._open_owner))

    async def _open_owner(self, request_id: str) -> None:
        await self.open_request(request_id, in_place=True)

    async def open_help(self) -> None:
        from vtoken_console.screens.help import HelpScreen

        if not isinstance(self._app.screen, HelpScreen):
            await self._app.push_screen(HelpScreen())
