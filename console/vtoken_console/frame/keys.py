"""The table of keys, the source of bindings, key bar, help page and command palette.

`control` keys change the server and are disabled if the console is read-only. The settings page
opens even then, to show what a change would do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """`keys`: Textual's names, comma separated; `rank` 0 is dropped last from the key bar.

    `id`: the action's name in key files. `words`: others by which the command palette finds it.
    """

    keys: str
    id: str
    label: str
    help: str
    group: str
    rank: int = 9
    words: str = ""

    @property
    def control(self) -> bool:
        """Whether it changes the server."""
        return self.id in CONTROL

    @property
    def page(self) -> str:
        """The page on which it works; empty for the dashboard."""
        return {"Fleet": "fleet", "Settings": "settings"}.get(self.group, "")

    @property
    def shown(self) -> str:
        """The first of `keys` as on the screen."""
        return shown_key(self.keys)

    @property
    def action(self) -> str:
        """Textual's action, of the application or of the dashboard."""
        name = self.id.replace("-", "_")
        if self.group in ("Set", "Panels"):
            return f"{'settings' if self.group == 'Set' else 'panel'}('{name}')"
        return f"app.{name}" if self.id in APP_ACTIONS else name


CONTROL = frozenset(
    {
        *("pause", "compact", "restore", "undo", "confirm", "apply", "trial"),
        *("sync-engines", "undo-engine"),
    }
)
KEYS: tuple[Key, ...] = (
    Key("enter", "open", "open", "open the request or the block under the cursor", "Look", 1),
    Key("slash", "filter", "filter", "part of an id, policy:h2o, state:waiting", "Look", 4),
    Key("s", "sort", "sort", "requests by wait, kept, gave up, arrival", "Look", 6, "slow waited"),
    Key("space,p", "freeze", "freeze", "the picture stands still; nothing is sent", "Look", 3),
    Key("z", "zoom-in", "zoom", "the map alone, a region, blocks, slots of a block", "Look", 8),
    Key("Z,backspace", "zoom-out", "zoom out", "back out", "Look"),
    Key("o", "mode", "colour", "map by live slots, request, or state", "Look", 8, "owner"),
    Key("T", "theme", "theme", "dark or light", "Look"),
    Key("F", "fleet", "fleet", "all engines, and back to one", "Look", 5, "servers"),
    Key("1", "requests", "requests", "the requests alone, or all panels", "Panels", 9, "slow wait"),
    Key("2", "pool", "map", "the map of all blocks alone", "Panels", 9, "memory heatmap"),
    Key("3", "charts", "charts", "the charts alone", "Panels", 9, "slow latency history"),
    Key("l,4", "log", "log", "the log alone", "Panels", 5, "events gave changes"),
    Key("5", "numbers", "numbers", "every figure", "Panels", 9, "slow metrics latency holes gates"),
    Key(
        "f",
        "floor",
        "floor",
        "the least that a request keeps",
        "Set",
        1,
        "budget memory slow evict",
    ),
    Key("P", "policy", "policy", "choose policy and parameters", "Set", 2, "evict"),
    Key("m", "settings", "settings", "all settings, with what-if", "Set", 4, "config"),
    Key(
        "u",
        "undo",
        "undo",
        "restore the configuration before the last one",
        "Act",
        2,
        "revert back",
    ),
    Key("U", "undo-dry", "undo?", "dry run of undo", "Act"),
    Key("c", "compact", "compact", "run one compaction now", "Act", 7, "holes defragment round"),
    Key("C", "compact-dry", "dry run", "dry run of a compaction", "Act"),
    Key(
        "H", "pause", "pause", "pause or resume reclamation; it asks first", "Act", 7, "stop evict"
    ),
    Key(
        "R",
        "restore",
        "restore",
        "bring back what the request under the cursor has parked; it asks first",
        "Act",
        7,
        "parked lost back",
    ),
    Key("y", "confirm", "keep", "keep the change that is on trial", "Act", 1, "trial"),
    Key("enter", "open-engine", "open", "the dashboard of the engine under the cursor", "Fleet"),
    Key(
        "s",
        "sort-engines",
        "sort",
        "sort engines: fleet, state, waiting, free, holes, tokens a second, p95",
        "Fleet",
    ),
    Key(
        "slash",
        "filter-engines",
        "filter",
        "engines by words of name, model, policy or state: gpu7 silent",
        "Fleet",
    ),
    Key("y", "sync-engines", "sync all", "give a change of one engine to all", "Fleet"),
    Key("u", "undo-engine", "undo", "take a change of one engine back", "Fleet"),
    Key("enter", "apply", "apply", "apply what was changed", "Settings"),
    Key(
        "ctrl+t",
        "trial",
        "on trial",
        "apply for a time, or under a guard; the engine then reverts it",
        "Settings",
    ),
    Key(
        "x", "export", "export", "this view as SVG, PNG, CSV or JSON", "Console", 8, "save picture"
    ),
    Key("r", "retry", "retry", "connect again now", "Console"),
    Key(
        "colon",
        "command-palette",
        "command",
        "a setting, policy, request or key (also ctrl+p)",
        "Console",
        3,
    ),
    Key("question_mark", "help", "help", "this page", "Console", 0, "legend keys words"),
    Key("ctrl+g", "skip-guide", "skip guide", "end the guided first minute", "Console"),
    Key("q", "quit", "quit", "leave; the server goes on", "Console", 0, "exit"),
)

DASHBOARD_KEYS = tuple(key for key in KEYS if not key.page)
PANELS = tuple(key.id for key in KEYS if key.group == "Panels")  # ids of the dashboard's widgets
GLOBAL = frozenset({"quit", "help", "command-palette", "skip-guide"})  # work on every page
APP_ACTIONS = GLOBAL | {"theme", "export", "retry", "fleet"}
ON_FLEET = APP_ACTIONS - GLOBAL  # work on the dashboard and on the fleet page


def pages(key: Key) -> tuple[str, ...]:
    """The pages on which a key works."""
    if key.id in GLOBAL:
        return ("", "settings", "fleet")
    return ("", "fleet") if key.id in ON_FLEET else (key.page,)


def shown_key(keys: str) -> str:
    """The first of comma-separated Textual keys as shown on the screen: ctrl+t as ^t."""
    first = keys.split(",")[0].strip()
    names = {"slash": "/", "colon": ":", "question_mark": "?"}
    first = names.get(first, first)
    return f"^{first.removeprefix('ctrl+')}" if first.startswith("ctrl+") else first


MOVES: tuple[tuple[str, str], ...] = (
    ("tab", "next panel"),
    ("arrows, j k, mouse", "move the cursor of the panel"),
    ("wheel, double click", "zoom the map (shift+wheel scrolls)"),
    ("page up/down, home, end", "move it far"),
    ("left right, on the charts", "step through the changes"),
    ("left right, in settings", "step a value, shift: by more; or type it; del: reset"),
    ("t, on a request's page", "its text, or its tokens"),
    ("c, R, on a request's page", "compact this request; bring back what it has parked"),
    ("space . < >, of a replay", "pause or play, one step, slower, faster"),
    ("[ ], of a replay", "5 s back, 5 s on; digits: go to that moment"),
    ("[ ], of several engines", "the engine before, the engine after"),
    ("escape", "close the page on top, show all panels, dismiss a message"),
)
