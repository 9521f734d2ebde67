"""What the command palette finds: keys, settings, policies, requests, colours; in this order.

Every word that is typed must be part of an entry's name, help or other words, so that `slow` finds
what helps a slow request. Imported when the palette is first opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from vtoken.base.request_ids import short_id
from vtoken_console.changes.fields import WORDS
from vtoken_console.frame.keys import pages
from vtoken_console.style.themes import DEPTHS, NAMES
from vtoken_console.widgets.heatmap.colouring import MODES

GROUPS = ("key", "setting", "policy", "request", "look")


@dataclass(frozen=True, slots=True)
class Entry:
    """`words`: what else it is found by. `changes`: the server."""

    group: str
    name: str
    help: str
    run: Callable[[], Awaitable[Any] | Any]
    words: str = ""
    changes: bool = False

    def rank(self, query: str) -> int:
        """How well a query in lower case fits, 0: not at all."""
        name, text = self.name.lower(), f"{self.name} {self.help} {self.words}".lower()
        if not all(word in text for word in query.split()):
            return 0
        return 3 if name.startswith(query) else 2 if query in name else 1

    @property
    def line(self) -> Content:
        name = "bold $vt-warn" if self.changes else "bold $vt-text"
        return Content.assemble(
            (f"{self.group:<9}", "$vt-faint"), (self.name, name), (f"  {self.help}", "$vt-muted")
        )


class Commands(Provider):
    """The entries of the page on which the palette was opened."""

    async def discover(self) -> Hits:
        for entry in self.entries():
            yield DiscoveryHit(entry.line, entry.run, entry.name)

    async def search(self, query: str) -> Hits:
        for entry in self.entries():
            if rank := entry.rank(query.lower()):
                score = rank * len(GROUPS) - GROUPS.index(entry.group)
                yield Hit(score, entry.line, entry.run, entry.name)

    def entries(self) -> Iterator[Entry]:
        """All entries, by GROUPS."""
        app: Any = self.app
        view, on_fleet = app.view(), self.screen is app.fleet.page
        read_only = bool(view.read_only_reason)
        run: Callable[..., Any]
        page = self.screen if on_fleet else app.dashboard
        for key in app.keys:
            works = ("fleet" if on_fleet else "") in pages(key) and key.id != "command-palette"
            if works and not (key.control and read_only):
                run = partial(app.run_action, key.action, default_namespace=page)
                name = f"{key.label} ({key.shown})"
                yield Entry("key", name, key.help, run, f"{key.words} {key.id}", key.control)
        model = app.session.model
        if not on_fleet and model is not None and model.config is not None:
            settings, hello = app.dashboard.action_settings, model.hello
            for name, bound in model.config.bounds.items():
                words = " ".join(WORDS.get((name,), ()))
                yield Entry("setting", name, bound.summary, partial(settings, name), words)
            for info in hello.policies if hello is not None else ():
                words = f"policy evict {info.source}"
                run = partial(settings, "policy", {"policy": {"name": info.name}})
                yield Entry("policy", info.name, info.summary, run, words)
            for row in model.requests.values():
                run = partial(app.dashboard.open_request, row.id)
                about = f"{row.state}, {row.prompt_tokens:,}+{row.output_tokens:,} tokens"
                yield Entry("request", short_id(row.id), about, run, row.id)
            for mode in MODES:
                run = partial(app.dashboard.set_mode, mode)
                yield Entry("look", f"map by {mode.value}", mode.summary, run, "colour")
        for theme in NAMES:
            for depth in DEPTHS:
                run = partial(app.set_theme, theme, depth)
                yield Entry("look", f"theme {theme}, {depth}", "colours of the console", run)
