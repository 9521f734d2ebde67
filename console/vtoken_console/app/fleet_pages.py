"""Several engines: the fleet page, and which of them the dashboard shows.

The fleet is watched from the moment that several servers are named, or that the server turns out to
have several engines. The page is the start page then, unless one engine is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken.client import Server
    from vtoken_console.frame.fleet import FleetReader, FleetRow, FleetView
    from vtoken_console.frame.view import View
    from vtoken_console.screens.fleet import FleetScreen


class FleetPages:
    """`reader` and `page` are None while one engine is watched, or none is known yet."""

    def __init__(self, app: Any) -> None:
        self.reader: FleetReader | None = None
        self.page: FleetScreen | None = None
        self._app = app

    @property
    def is_shown(self) -> bool:
        """Whether the fleet page is on top."""
        return self.page is not None and self._app.screen is self.page

    @property
    def settled(self) -> bool:
        """Whether every engine of the fleet has been read or has failed once."""
        return self.reader is not None and self.reader.fleet.settled

    @property
    def received_bytes(self) -> int:
        return 0 if self.reader is None else self.reader.fleet.received_bytes

    def view(self) -> FleetView | None:
        """The newest state of all engines."""
        reader = self.reader
        return None if reader is None else reader.view(time.time(), time.monotonic())

    def retry_now(self) -> None:
        if self.reader is not None:
            self.reader.fleet.retry_now()

    # ------------------------------------------------------------ the page

    def needs_begin(self, view: View) -> bool:
        """Whether the server on the screen has several engines, and they are not watched yet."""
        hello = view.model.hello if view.model is not None and view.replay is None else None
        return self.reader is None and hello is not None and len(hello.engines) > 1

    async def begin_of_server(self) -> None:
        """Watches all engines of the session's server, also if one is named."""
        session = self._app.session
        if self.reader is None and session.server is not None:
            server = replace(session.server, engine=None, shown=None)
            await self.begin([server], shown=session.engine is None)

    async def begin(self, servers: Sequence[Server], *, shown: bool = True) -> None:
        """Watches all engines of `servers`; `shown`: on the fleet page."""
        from vtoken_console.feed.fleet import Fleet
        from vtoken_console.frame.fleet import FleetReader
        from vtoken_console.screens.fleet import FleetScreen

        self.reader = FleetReader(Fleet(servers))
        self.page = FleetScreen()
        self._app.install_screen(self.page, name="fleet")
        self._app.run_worker(self.reader.fleet.run(), name="fleet", exit_on_error=True)
        if shown:
            await self._show()

    async def toggle(self) -> None:
        """Shows the fleet page; on it, goes back to the engine that was shown last."""
        if self.page is None:
            self._app.notify("One engine is watched, and it is on the screen.")
        elif self._app.screen is self._app.dashboard:
            await self._show()
        elif self.is_shown:
            row = self._row_of_session() or self.page.table.chosen
            if row is not None:
                self.open(row)

    async def _show(self) -> None:
        await self._app.push_screen("fleet")
        self._app.tick()
        await self._app.session.pause()  # the page behind is not seen

    # ------------------------------------------------------------ the engine on the dashboard

    def open(self, row: FleetRow) -> None:
        """Shows the dashboard of a row's engine, once its data is there."""
        row = self._newest(row)
        if row.status is None:
            why = row.problem or "its first state has not come yet"
            self._app.notify(f"{row.name} cannot be opened: {why}.", severity="error")
            return
        self._app.run_worker(self._open(row), group="open", exclusive=True)

    async def _open(self, row: FleetRow) -> None:
        app = self._app
        one = app.session.engine is not None  # changes are made on the engine that is shown
        server = replace(row.server, engine=row.rank if one else None, shown=row.rank)
        await app.session.open(server)
        app.forget_engine()
        if self.page is not None:
            self.page.table.choose(row.key)
        if self.is_shown:
            app.pop_screen()
        app.tick()

    def step(self, by: int) -> None:
        """On the dashboard, shows the next engine with a state; on the page, moves the cursor."""
        if self.page is not None and self.is_shown:
            self.page.table.action_move(0, by)
            return
        shown = self._row_of_session()
        if shown is None or self._app.screen is not self._app.dashboard:
            return
        rows = [row for row in self._rows() if row.status is not None]
        keys = [row.key for row in rows]
        if shown.key in keys and len(rows) > 1:
            self.open(rows[(keys.index(shown.key) + by) % len(rows)])

    def _rows(self) -> Sequence[FleetRow]:
        view = self.view()
        return () if view is None else view.rows

    def _newest(self, row: FleetRow) -> FleetRow:
        """The row as it is now; its engine may have become known since it was drawn."""
        rows = [found for found in self._rows() if found.server == row.server]
        return next((found for found in rows if row.rank in (None, found.rank)), row)

    def _row_of_session(self) -> FleetRow | None:
        """The row of the engine that the dashboard shows, or showed last."""
        server = self._app.session.server
        if server is None:
            return None
        rank = server.shown if server.engine is None else server.engine
        rows = [row for row in self._rows() if row.server.url == server.url]
        return next((row for row in rows if row.rank == rank), rows[0] if rows else None)
