"""The last line: the available keys, as many as fit by rank.

Textual's Footer shows the bindings that are enabled. Here a key that is off is not shown, but it is
bound, and answers with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from vtoken_console.frame.keys import Key
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, merge

Hint = tuple[str, str, int]  # key, label, rank: the highest is dropped first


def key_spans(keys: Iterable[tuple[str, str]]) -> list[Span]:
    """Keys with their labels, side by side."""
    spans: list[Span] = []
    for key, label in keys:
        spans += [(f" {key}", palette.KEY_STYLE), (f" {label} ", palette.MUTED_STYLE)]
    return spans


def dashboard_hints(view: View) -> list[Hint]:
    """The keys of the dashboard that do something now."""
    return [(key.shown, _label(key, view), key.rank) for key in _usable(view)]


def _usable(view: View) -> list[Key]:
    if view.model is None:
        return [k for k in view.keys if k.group == "Console"]
    config = view.model.config
    off = {"confirm"} if config is None or config.trial is None else set()
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
    return key.label


class KeyBar(LinesWidget):
    """`hints`: the keys of the page."""

    def __init__(self, hints: Callable[[View], list[Hint]], *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._hints = hints

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        shown = self._hints(view)
        while shown and sum(len(key) + len(label) + 3 for key, label, _ in shown) > width:
            shown.remove(max(shown, key=lambda hint: hint[2]))
        return [merge(key_spans((key, label) for key, label, _ in shown))]
