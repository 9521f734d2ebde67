"""The last line: the available keys, as many as fit by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vtoken_console.frame.keys import Key
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget, Span, merge


def key_spans(keys: Iterable[tuple[str, str]]) -> list[Span]:
    """Keys with their labels, side by side."""
    spans: list[Span] = []
    for key, label in keys:
        spans += [(f" {key}", palette.KEY_STYLE), (f" {label} ", palette.MUTED_STYLE)]
    return spans


def _label(key: Key, view: View) -> str:
    status = view.model.status if view.model else None
    if key.id == "pause" and status is not None and status.reclamation.state != "auto":
        return "resume"
    return key.label


class KeyBar(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        config = view.model.config if view.model else None
        off = {"confirm"} if config is None or config.trial is None else set()
        usable = [
            k
            for k in view.keys
            if not (k.control and view.read_only_reason) and k.rank < 9 and k.id not in off
        ]
        if view.replay is None and view.model is not None and not view.connection.is_live:
            retry = [replace(k, rank=0) for k in view.keys if k.id == "retry"]
            usable = [*retry, *(k for k in usable if not k.control)]
        if view.replay is not None:  # there is no server
            usable = [k for k in usable if k.group not in ("Act", "Set")]
        if view.model is None:
            usable = [k for k in view.keys if k.group == "Console"]
        shown: list[tuple[Key, str]] = [(key, _label(key, view)) for key in usable]
        while shown and sum(len(k.shown) + len(label) + 3 for k, label in shown) > width:
            shown.remove(max(shown, key=lambda pair: pair[0].rank))
        return [merge(key_spans((key.shown, label) for key, label in shown))]
