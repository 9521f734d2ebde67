"""The table of keys, the source of bindings, key bar, help page and command palette.

`control` keys change the server and are disabled if the console is read-only. The settings page
opens even then, to show what a change would do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """`keys`: Textual's names, comma separated; `rank` 0 is dropped last from the key bar.

    `id`: the action's name in key files.
    """

    keys: str
    id: str
    label: str
    help: str
    group: str
    rank: int = 9

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
        if self.group == "Set":
            return f"settings('{name}')"
        return f"app.{name}" if self.id in APP_ACTIONS else name


CONTROL = frozenset(
    {
        *("pause", "compact", "undo", "confirm", "apply", "trial"),
        *("sync-engines", "undo-engine"),
    }
)
KEYS: tuple[Key, ...] = (
    Key("p", "pause", "pause", "stop planning new relocations, or resume", "Act", 2),
    Key("c", "compact", "compact", "run one compaction round now", "Act", 1),
    Key("C", "compact-dry", "dry run", "dry run of a compaction", "Act", 8),
    Key("u", "undo", "undo", "restore the configuration before the last one", "Act", 3),
    Key("U", "undo-dry", "undo?", "dry run of undo", "Act"),
    Key("y", "confirm", "keep", "keep the change that is on trial", "Act", 8),
    Key("P", "policy", "policy", "choose policy and parameters", "Set", 2),
    Key("t", "theta-f", "theta", "set the threshold theta_F", "Set", 3),
    Key("b", "batch-size", "batch", "set B, blocks of one round", "Set", 4),
    Key("m", "budget-tokens", "more", "all settings, with what-if", "Set", 5),
    Key("z", "zoom-in", "zoom", "pool, region, blocks, slots of a block", "Look", 4),
    Key("Z,backspace", "zoom-out", "zoom out", "back out", "Look"),
    Key("enter", "open", "open", "open the request or the block under the cursor", "Look", 4),
    Key(
        "slash",
        "filter",
        "filter",
        "requests and blocks: req:a91f policy:h2o state:shared, or text",
        "Look",
        6,
    ),
    Key("s", "sort", "sort", "sort requests: arrival, excess blocks, live, dead", "Look"),
    Key("e", "event-kinds", "events", "log: moves and changes only, or all", "Look", 8),
    Key("v", "view", "view", "all panels, or one of them alone", "Look", 6),
    Key("k", "mode", "colour", "heatmap by utilisation, age, owner, churn, state", "Look", 5),
    Key("K", "ramp", "ramp", "next colour ramp of utilisation", "Look"),
    Key("T", "theme", "theme", "dark or light", "Look"),
    Key("f", "fleet", "fleet", "all engines, and back to one", "Look", 1),
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
    Key("x", "export", "export", "this view as SVG, PNG, CSV or JSON", "Console", 7),
    Key("r", "retry", "retry", "connect again now", "Console"),
    Key(
        "colon",
        "command-palette",
        "command",
        "find any command by name (also ctrl+p)",
        "Console",
        3,
    ),
    Key("question_mark", "help", "help", "this page", "Console", 0),
    Key("ctrl+g", "skip-guide", "skip guide", "end the guided first minute", "Console"),
    Key("q", "quit", "quit", "leave; the server goes on", "Console", 0),
)

DASHBOARD_KEYS = tuple(key for key in KEYS if not key.page)
GLOBAL = frozenset({"quit", "help", "command-palette", "skip-guide"})  # work on every page
APP_ACTIONS = GLOBAL | {"ramp", "theme", "export", "retry", "fleet"}
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
    ("arrows, mouse", "move the cursor of the panel"),
    ("wheel, double click", "zoom the heatmap (shift+wheel scrolls)"),
    ("page up/down, home, end", "move it far"),
    ("left right, on the charts", "step through the changes"),
    ("left right, in settings", "step a value, shift: by more; or type it; del: reset"),
    ("t, on a request's page", "its text, or its tokens"),
    ("c, on a request's page", "compact this request"),
    ("space . < >, of a replay", "pause or play, one step, slower, faster"),
    ("[ ], of a replay", "5 s back, 5 s on; digits: go to that moment"),
    ("[ ], of several engines", "the engine before, the engine after"),
    ("escape", "close the page on top, dismiss a message"),
)
