"""The keys of the dashboard's panels: nearer and back, filter, order, one panel alone."""

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

    # ------------------------------------------------------------ nearer and back

    async def zoom_in(self) -> None:
        heatmap = self._dashboard.heatmap
        heatmap.focus()
        await self.nearer(slots=True)

    async def nearer(self, *, slots: bool) -> None:
        """One step into the map; the last one is a block's page, if `slots` may come."""
        heatmap = self._dashboard.heatmap
        if not heatmap.zoom_in() and slots:
            await self._pages.open_block(heatmap.cursor)

    def zoom_out(self) -> None:
        self._dashboard.heatmap.zoom_out()

    async def open(self) -> None:
        """The page of what is under the cursor of the panel that has the keys."""
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
        self._dashboard.say(f"Requests sorted by {order}.")

    def event_kinds(self) -> None:
        every = self._dashboard.query_one(Events).toggle_kinds()
        self._dashboard.say(
            "The log shows every event." if every else "The log shows moves and changes."
        )

    def next_view(self) -> None:
        """All panels, then each of them alone."""
        at = VIEWS.index(self._dashboard.shown) + 1
        name, after = (VIEWS[n % len(VIEWS)] for n in (at, at + 1))
        self._dashboard.set_view(name)
        self._dashboard.say(
            "All panels."
            if name == "all"
            else f"Only {name}; {self._view_key} goes on, to {after}."
        )
