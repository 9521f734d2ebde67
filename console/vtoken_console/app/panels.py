"""The keys of the dashboard's panels: zoom, open, sort order, event kinds, view."""

from __future__ import annotations

from vtoken_console.app.pages import Pages
from vtoken_console.frame.keys import Key
from vtoken_console.screens.dashboard import VIEWS, Dashboard
from vtoken_console.widgets.events import Events
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.requests import Requests


class Panels:
    def __init__(self, dashboard: Dashboard, pages: Pages, keys: tuple[Key, ...]) -> None:
        self._dashboard = dashboard
        self._pages = pages
        self._view_key = next(key.shown for key in keys if key.id == "view")

    # ------------------------------------------------------------ zoom

    async def zoom_in(self) -> None:
        heatmap = self._dashboard.heatmap
        heatmap.focus()
        await self.zoom_step(slots=True)

    async def zoom_step(self, *, slots: bool) -> None:
        """Zooms in one level. The level after the last is a block's page, if `slots`."""
        heatmap = self._dashboard.heatmap
        if not heatmap.zoom_in() and slots:
            await self._pages.open_block(heatmap.cursor)

    def zoom_out(self) -> None:
        self._dashboard.heatmap.zoom_out()

    async def open(self) -> None:
        """Opens the page of the item under the focused panel's cursor."""
        focused = self._dashboard.focused
        if isinstance(focused, Heatmap):
            await self.zoom_in()
        elif isinstance(focused, Requests) and focused.chosen is not None:
            await self._pages.open_request(focused.chosen.id)
        elif isinstance(focused, Events) and focused.chosen is not None:
            request_id = focused.chosen.data.get("request_id")
            if request_id:
                await self._pages.open_request(str(request_id))

    # ------------------------------------------------------------ panels

    def sort(self) -> None:
        order = self._dashboard.query_one(Requests).next_sort()
        self._dashboard.show_message(f"Requests sorted by {order}.")

    def event_kinds(self) -> None:
        all_kinds = self._dashboard.query_one(Events).toggle_kinds()
        self._dashboard.show_message(
            "The log shows every event." if all_kinds else "The log shows moves and changes."
        )

    def next_view(self) -> None:
        """Cycles through all panels and each panel alone."""
        at = VIEWS.index(self._dashboard.shown) + 1
        name, after = (VIEWS[n % len(VIEWS)] for n in (at, at + 1))
        self._dashboard.set_view(name)
        self._dashboard.show_message(
            "All panels."
            if name == "all"
            else f"Only {name}; {self._view_key} goes on, to {after}."
        )
