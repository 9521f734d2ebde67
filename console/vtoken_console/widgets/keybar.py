"""The last line: the available keys, as many as fit by rank. A click on one presses it.

Textual's Footer shows the bindings that are enabled, each as a widget. Here a key that is off is
not shown, but it is bound, and answers with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.style import Style

from vtoken_console.frame.keys import Key
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, merge

FLEET_RANKS = {  # of the fleet page's keys, in order
    "open-engine": 1,
    "sort-engines": 1,
    "filter-engines": 1,
    "fleet": 1,
    "retry": 2,
    "export": 3,
    "theme": 4,
    "help": 0,
    "quit": 0,
}


@dataclass(frozen=True, slots=True)
class Hint:
    """`rank`: the highest is dropped first. `key`: Textual's name of what a click presses.

    `control`: it changes the server.
    """

    shown: str
    label: str
    rank: int = 0
    key: str = ""
    control: bool = False

    @classmethod
    def of(cls, key: Key, label: str = "", rank: int | None = None) -> Hint:
        rank = key.rank if rank is None else rank
        first = key.keys.partition(",")[0]
        return cls(key.shown, label or key.label, rank, first, key.control)

    @property
    def width(self) -> int:
        return len(self.shown) + len(self.label) + 3


REPLAY = (  # of a recording
    Hint("space", "play", 1, "space"),
    Hint("[ ]", "5 s", 2),
    Hint("< >", "speed", 4),
    Hint(".", "step", 6, "full_stop"),
    Hint("00:30", "go there", 3),
)


def hint_spans(hints: Sequence[Hint], width: int) -> list[Span]:
    """Keys with their labels side by side, as many as fit `width` columns."""
    shown = [*hints]
    while shown and sum(hint.width for hint in shown) > width:
        shown.remove(max(shown, key=lambda hint: hint.rank))
    spans: list[Span] = []
    for hint in shown:
        press = Style(meta={"@click": f"app.simulate_key('{hint.key}')"}) if hint.key else Style()
        style = palette.CONTROL_STYLE if hint.control else palette.KEY_STYLE
        spans += [
            (f" {hint.shown}", style + press),
            (f" {hint.label} ", palette.MUTED_STYLE + press),
        ]
    return spans


def dashboard_hints(view: View) -> list[Hint]:
    """The keys of the dashboard that do something now."""
    hints = [Hint.of(key, _label(key, view)) for key in _usable(view)]
    if view.replay is not None:
        return [*REPLAY, *(hint for hint in hints if hint.key != "space")]
    return [replace(h, rank=0) if h.key == "space" and view.frozen_ts else h for h in hints]


def fleet_hints(view: View) -> list[Hint]:
    """The keys of the fleet page."""
    labels = {"fleet": "back"}
    off = {"fleet"} if view.model is None else set()  # no engine was opened
    return [
        Hint.of(view.key_of(name), labels.get(name, ""), rank)
        for name, rank in FLEET_RANKS.items()
        if name not in off
    ]


def _usable(view: View) -> list[Key]:
    if view.model is None:
        return [k for k in view.keys if k.group == "Console"]
    config = view.model.config
    off = {"confirm"} if config is None or config.trial is None else set()
    if not any(row.parked_tokens for row in view.model.requests.values()):
        off.add("restore")
    usable = [
        k
        for k in view.keys
        if not (k.control and view.read_only_reason) and k.rank < 9 and k.id not in off
    ]
    if view.replay is not None:  # there is no server
        return [k for k in usable if k.group not in ("Act", "Set")]
    if not view.connection.is_live:
        retry = [replace(k, rank=0) for k in view.keys if k.id == "retry"]
        return [*retry, *(k for k in usable if not k.control)]
    return usable


def _label(key: Key, view: View) -> str:
    status = view.model.status if view.model else None
    if key.id == "pause" and status is not None and status.reclamation.state != "auto":
        return "resume"
    if key.id == "freeze" and view.frozen_ts:
        return "go on"
    return key.label


class KeyBar(LinesWidget):
    """`hints`: the keys of the page."""

    def __init__(self, hints: Callable[[View], list[Hint]], *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._hints = hints

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        return [merge(hint_spans(self._hints(view), width))]
