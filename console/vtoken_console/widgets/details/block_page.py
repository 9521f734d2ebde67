"""One block: owners, why it is pinned, slots and observed history.

Shows the server's response. Without one (in a replay), shows the state from the stream and why
there are no slots.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from vtoken.sentences import clock, flag_words
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.words import has_no_tokens
from vtoken_console.widgets.heatmap.text import block_spans
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, cut, merge

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken import wire
    from vtoken.wire.reducer import StreamState

CELL = 16
MAX_HISTORY = 8
PINNED = {
    "shared prefix": "pinned: shared prefix, never written",
    "hashed": "pinned: in the prefix cache, never written",
    "in flight": "pinned: source or destination of a relocation",
    "none": "not pinned: may be compacted",
}


class BlockPage(LinesWidget):
    """Owners, slots and history of `block`; a power of two slots per line."""

    def __init__(self, block: int) -> None:
        super().__init__(id="slots", classes="page")
        self.block = block
        self.detail: wire.BlockDetail | None = None
        self.problem = ""

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        model, detail = view.model, self.detail
        keys = "left/right next block   enter open owner   esc close"
        self.set_titles(f"block {self.block:,}", keys)
        if model is None or self.block >= model.num_blocks:
            return [EMPTY, ((" waiting for the server …", palette.MUTED_STYLE),)]
        known = detail is not None and detail.id == self.block
        lines = self._from_server(view, width) if known else self._from_stream(model, view, width)
        lines += [EMPTY, *self._history(view, model, width)]
        return lines

    def _from_stream(self, model: StreamState, view: View, width: int) -> list[Line]:
        """The block's state in the stream, and why there are no slots."""
        activity = view.activity
        spans: list[Span] = [(" ", palette.TEXT_STYLE)]
        spans += block_spans(self.block, model, activity) if activity is not None else []
        reason = self.problem or "loading its slots …"
        style = palette.WARN_STYLE if self.problem else palette.MUTED_STYLE
        wrapped = textwrap.wrap(reason, max(20, width - 2))
        return [merge(cut(spans, width)), EMPTY, *(((f" {part}", style),) for part in wrapped)]

    def _from_server(self, view: View, width: int) -> list[Line]:
        """The server's response."""
        muted, text, detail = palette.MUTED_STYLE, palette.TEXT_STYLE, self.detail
        assert detail is not None
        size = len(detail.slots)
        pinned = PINNED.get(detail.pinned, detail.pinned) if detail.ref_cnt else "free"
        head: list[Span] = [
            (f" {detail.live:>{len(str(size))}}/{size} live", palette.BOLD_STYLE),
            (f"   held by {detail.ref_cnt}   ", muted),
            (pinned, text),
            *((f"  {word}", muted) for word in flag_words(detail.flags) if word not in pinned),
        ]
        if has_no_tokens(detail.flags):
            head = [(f" {word}", text) for word in flag_words(detail.flags)]
        lines: list[Line] = [merge(cut(head, width)), EMPTY]
        if not detail.slots:
            return lines
        id_width = max(26, min(40, width - 36))
        if detail.owners:
            name = "owner".ljust(id_width)
            lines.append(((f" {name} live   index in its block table", muted),))
        lines += [
            ((f" {units.fit(o.request_id, id_width)}{o.live:>5}   {o.index:,}", text),)
            for o in detail.owners
        ]
        if self.problem:
            lines.append(merge(cut([(f" {self.problem}", palette.WARN_STYLE)], width)))
        lines += [EMPTY, ((" slot by slot: offset, state, token", muted),)]
        per_line = max(1, (width - 2) // CELL)
        while per_line > 1 and per_line & (per_line - 1):
            per_line -= 1
        for first in range(0, size, per_line):
            spans: list[Span] = [(" ", text)]
            for slot in detail.slots[first : first + per_line]:
                spans += _slot(slot, view)
            lines.append(merge(spans))
        return lines

    def _history(self, view: View, model: StreamState, width: int) -> list[Line]:
        activity, muted = view.activity, palette.MUTED_STYLE
        if activity is None:
            return []
        head = f" history, seen since {clock(activity.since)}"
        lines: list[Line] = [merge(cut([(head, muted)], width))]
        seen = activity.history(self.block, model.events)
        for entry in seen[:MAX_HISTORY]:
            spans = [
                (f" {clock(entry.ts)} ", palette.FAINT_STYLE),
                (entry.text, palette.TEXT_STYLE),
            ]
            lines.append(merge(cut(spans, width)))
        if len(seen) > MAX_HISTORY:
            lines.append(((f" and {len(seen) - MAX_HISTORY:,} more before", muted),))
        if not seen:
            lines.append(((" not taken, freed or moved in this time", muted),))
        return lines


def _slot(slot: wire.BlockSlot, view: View) -> list[Span]:
    styles: dict[str, tuple[str, Style]] = {
        "live": ("█", palette.style(palette.BAR)),
        "dead": ("x" if view.ascii_only else "░", palette.WARN_STYLE),
        "free": ("·", palette.FAINT_STYLE),
    }
    glyph, style = styles[slot.state]
    token = f"{slot.token_id:>6}" if slot.token_id is not None else " " * 6
    ink = palette.TEXT_STYLE if slot.state == "live" else palette.FAINT_STYLE
    return [
        (f"{slot.offset:>3} ", palette.FAINT_STYLE),
        (glyph * 2, style),
        (f"{token} {'dead' if slot.state == 'dead' else ''}".ljust(CELL - 6), ink),
    ]
