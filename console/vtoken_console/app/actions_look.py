"""The keys that change what is seen, never what the server does: zoom, filter, colours, panels."""

from __future__ import annotations

from vtoken_console.app.base import Base
from vtoken_console.look.appearance import Appearance
from vtoken_console.look.diff_renderer import set_color_system
from vtoken_console.look.themes import DEPTHS, NAMES, SYSTEMS
from vtoken_console.screens.dashboard import VIEWS
from vtoken_console.widgets.events import Events
from vtoken_console.widgets.heatmap.colouring import MODES, Mode
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.requests import Requests


class LookActions(Base):
    @property
    def heatmap(self) -> Heatmap:
        return self.dashboard.query_one(Heatmap)

    # ------------------------------------------------------------ nearer and back

    async def action_zoom_in(self) -> None:
        heatmap = self.heatmap
        heatmap.focus()
        if not heatmap.zoom_in():
            await self.open_block(heatmap.cursor)

    def action_zoom_out(self) -> None:
        self.heatmap.zoom_out()

    async def on_pointer_nearer(self, event: Heatmap.Nearer) -> None:
        if not self.heatmap.zoom_in() and event.slots:
            await self.open_block(self.heatmap.cursor)

    async def action_open(self) -> None:
        focused = self.dashboard.focused
        if isinstance(focused, Heatmap):
            await self.action_zoom_in()
        elif isinstance(focused, Requests) and focused.chosen is not None:
            await self.open_request(focused.chosen.id)
        elif isinstance(focused, Events) and focused.chosen is not None:
            request_id = focused.chosen.data.get("request_id")
            if request_id:
                await self.open_request(str(request_id))

    async def open_request(self, request_id: str) -> None:
        from vtoken_console.screens.request import RequestScreen

        if self.source is not None:
            await self.push_screen(RequestScreen(self.source, request_id, self.open_block))

    async def open_block(self, block_id: int) -> None:
        from vtoken_console.screens.block import BlockScreen

        if self.source is not None and self.source.feed.model.synced:
            await self.push_screen(BlockScreen(self.source, block_id, self._open_owner))

    async def _open_owner(self, request_id: str) -> None:
        """A request's page in the place of the page of one of its blocks."""
        from vtoken_console.screens.request import RequestScreen

        if self.source is not None:
            await self.switch_screen(RequestScreen(self.source, request_id, self.open_block))

    # ------------------------------------------------------------ panels

    def action_filter(self) -> None:
        self.dashboard.open_filter()

    def action_sort(self) -> None:
        self.say(f"Requests sorted by {self.dashboard.query_one(Requests).next_sort()}.")

    def action_event_kinds(self) -> None:
        every = self.dashboard.query_one(Events).toggle_kinds()
        self.say("The log shows every event." if every else "The log shows moves and changes.")

    def action_view(self) -> None:
        at = VIEWS.index(self.dashboard.shown) + 1
        name, after = (VIEWS[n % len(VIEWS)] for n in (at, at + 1))
        self.dashboard.set_view(name)
        key = next(k.shown for k in self.keys if k.id == "view")
        self.say("All panels." if name == "all" else f"Only {name}; {key} goes on, to {after}.")

    # ------------------------------------------------------------ colours

    def action_mode(self) -> None:
        at = MODES.index(self.heatmap.mode)
        self.set_mode(MODES[(at + 1) % len(MODES)])

    def set_mode(self, mode: Mode) -> None:
        """What the heatmap's colours mean from now on."""
        self.heatmap.set_mode(mode)
        model = self.source.feed.model if self.source else None
        if mode is Mode.OWNER and model is not None and not len(model.owner):
            self.say("This server does not tell the owners of blocks.", is_error=True)
        else:
            self.say(f"Colour by {mode.value}: {mode.summary}.")

    def action_ramp(self) -> None:
        names = self.look.ramp_names
        at = names.index(self.look.ramp_name) if self.look.ramp_name in names else -1
        self.set_ramp(names[(at + 1) % len(names)])

    def set_ramp(self, name: str) -> None:
        self.look = self.look.with_ramp(name)
        self.say(f"Colours: {name}: {self.look.ramp.summary}.")
        self.tick_soon()

    def action_theme(self) -> None:
        at = NAMES.index(self.look.theme.name)
        self.set_theme(NAMES[(at + 1) % len(NAMES)], self.look.theme.depth)

    def action_colors(self) -> None:
        at = DEPTHS.index(self.look.theme.depth)
        self.set_theme(self.look.theme.name, DEPTHS[(at + 1) % len(DEPTHS)])

    def set_theme(self, name: str, depth: str) -> None:
        """Another theme, at once."""
        self.wear(self.look.with_theme(name, depth))
        self.say(f"Theme: {name}, {depth} colours." if depth != "truecolor" else f"Theme: {name}.")
        self.tick_soon()

    def wear(self, look: Appearance) -> None:
        """Puts on `look`: Textual's theme, the colours sent, and every frame from now on."""
        self.look = look
        self.register_theme(look.theme.for_textual())
        self.theme = look.theme.full_name
        set_color_system(self, SYSTEMS[look.theme.depth])
