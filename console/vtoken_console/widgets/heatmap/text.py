"""The text around the heatmap: title, legend, cell under the cursor, overview of the pool.

Reads the widget without changing it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from vtoken.base.request_ids import short_id
from vtoken.sentences import flag_words
from vtoken.wire import FLAG_NULL, FLAG_OTHER, FLAG_USED
from vtoken_console.frame.filters import shortfall
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.grid import Grid, Zoom
from vtoken_console.style.ramp import FREE_LEVEL, Ramp, ink_on
from vtoken_console.style.words import other_words
from vtoken_console.widgets.heatmap.colouring import STATE_KINDS, Mode
from vtoken_console.widgets.lines import Line, Span, cut, merge, width_of

if TYPE_CHECKING:
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.activity import Activity

NAMES = {Zoom.POOL: "pool", Zoom.REGION: "region", Zoom.BLOCKS: "blocks"}
SIGHT = (("·", "█"), (".", "#"))  # [ASCII only][in sight]


@dataclass(frozen=True, slots=True)
class Shown:
    """What the map shows, from row `top` on. `matching`: blocks that the filter finds, if any."""

    grid: Grid
    zoom: Zoom
    mode: Mode
    matching: int | None
    top: int
    cursor: int


def title(shown: Shown, view: View, model: StreamState) -> str:
    """What is shown, or how much of it the filter finds."""
    grid = shown.grid
    total = f"{model.num_blocks - 1:,} blocks"  # without the null block
    text = f"{NAMES[shown.zoom]} · {total}"
    if shown.matching is not None:
        return f"{NAMES[shown.zoom]} · {shown.matching:,} of {total} match"
    if shown.zoom is Zoom.BLOCKS:
        text += f" · {model.block_size} slots each"
    elif grid.per_cell > 1:
        text += f" · {grid.per_cell} a cell"
    if shown.mode is not Mode.UTILISATION:
        text += f" · by {shown.mode.value}"
    problem = shortfall(view.filter, model)
    return f"{text} · {problem}" if problem else text


def overview(shown: Shown, view: View, model: StreamState, width: int, room: int) -> Line:
    """The pool in one line, with the visible part taller and its block ids on the right."""
    from vtoken_console.style import cells

    grid = shown.grid
    last_row = min(grid.rows, shown.top + max(1, room // grid.cell_height))
    visible = grid.blocks_of_rows(shown.top, last_row)
    total = f"{grid.num_blocks - 1:,}"
    digits = len(total)
    ids = f" {visible.start:>{digits},}–{visible.stop - 1:<{digits},} of {total} "
    columns = max(1, width - len(ids) - 1)
    per = -(-grid.num_blocks // columns)
    columns = -(-grid.num_blocks // per)
    levels = cells.levels(cells.summarize(model.live, model.flags, model.block_size, per).mean)
    first, last = visible.start // per, (visible.stop - 1) // per
    spans: list[Span] = [(" ", palette.NO_STYLE)]
    ramp = view.ramp
    for column, level in enumerate(levels.tolist()):
        inside = first <= column <= last
        if not ramp.colors:
            glyph = SIGHT[view.ascii_only][inside]
            spans.append((glyph, palette.TEXT_STYLE if inside else palette.FAINT_STYLE))
        else:
            color = palette.BORDER if level == FREE_LEVEL else ramp.colors[level]
            spans.append(("█" if inside else "▂", palette.style(color)))
    spans.append((ids, palette.MUTED_STYLE))
    return merge(cut(spans, width))


def legend(view: View, mode: Mode, width: int, *, single: bool) -> Line:
    """The legend of this mode in one line: as many of its parts as fit, the plainest last."""
    muted = palette.MUTED_STYLE
    coloured = bool(view.ramp.colors)
    parts: list[list[Span]] = []
    if others := _others(view.model):
        back = view.ramp.other_color if coloured else None
        parts.append([("~", palette.style(palette.MUTED, back)), (f" {others}", muted)])
    if mode is Mode.UTILISATION:
        parts.append([("dead ", muted), *_scale(view.ramp), (" live", muted)])
    elif mode is Mode.OWNER:
        hues = [_hue(view, letter, n) for n, letter in enumerate("abcdefg", 1)]
        parts.append([*hues, (" a request, by its letter in the table", muted)])
    else:
        kinds = [(_hue(view, kind.letter, kind.hue), kind.word) for kind in STATE_KINDS]
        parts += [[letter, (f" {word}", muted)] for letter, word in kinds]
    dot = palette.style(palette.BORDER, view.ramp.free_color)
    parts.append([("·", dot) if coloured else ("blank", muted), (" free", muted)])
    if mode.is_kind:
        parts.append([("2.. that many", muted)])
    elif single:
        parts.append([("s shared  f being filled  * moving", muted)])
    elif coloured:
        sample = palette.style(view.ramp.colors[2], view.ramp.colors[-3])
        parts.append([("▂", sample), (" mean over worst", muted)])
    else:
        parts.append([("left mean, right worst", muted)])
    parts.append([("o moved from @ to" if view.ascii_only else "○ moved from ● to", muted)])
    spans: list[Span] = []
    for part in parts:
        if width_of(spans) + 2 + width_of(part) <= width:
            spans += [("  " if spans else " ", muted), *part]
    return merge(spans)


def _others(model: StreamState | None) -> str:
    status = None if model is None else model.status
    return "" if status is None else other_words(status.groups)


def _scale(ramp: Ramp) -> list[Span]:
    if ramp.colors:
        return [(" ", palette.style(None, color)) for color in ramp.colors[::2]]
    return [(ramp.glyphs[::2], palette.TEXT_STYLE)]


def _hue(view: View, letter: str, number: int) -> Span:
    if not view.ramp.colors:
        return letter, palette.TEXT_STYLE
    back = view.theme.hue(number)
    return letter, palette.style(ink_on(back), back)


def under_cursor(shown: Shown, model: StreamState, activity: Activity, width: int) -> Line:
    """The contents of the cell under the cursor."""
    grid = shown.grid
    cell = grid.cell_of_block(shown.cursor)
    blocks = grid.blocks_of(cell)
    if len(blocks) == 1:
        name: Span = (f" block {shown.cursor:,}  ", palette.MUTED_STYLE)
        spans = [name, *block_spans(shown.cursor, model, activity)]
    else:
        spans = _some_blocks(model, blocks)
    if len(blocks) == 1:
        spans.append(("   enter slots", palette.FAINT_STYLE))
    return merge(cut(spans, width))


def block_spans(block: int, model: StreamState, activity: Activity) -> list[Span]:
    """What the stream says of a block."""
    size = model.block_size
    muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
    flags = int(model.flags[block])
    if flags & FLAG_OTHER:
        return [(f"held by a {_others(model)}", text)]
    if not flags & FLAG_USED:
        return [(", ".join(flag_words(flags)) or "free", text)]
    live = int(model.live[block])
    spans: list[Span] = [(f"{live:>{len(str(size))}}/{size} live", text)]
    number = int(model.owner[block]) if len(model.owner) else 0
    if number:
        from vtoken_console.widgets.heatmap.cell_paint import letter_of

        who = short_id(activity.names.get(number, f"#{number}"))
        spans += [("  of ", muted), (f"{who} ({letter_of(number)})", text)]
    return [*spans, *((f"  {word}", text) for word in flag_words(flags))]


def _some_blocks(model: StreamState, blocks: range) -> list[Span]:
    muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
    part = slice(blocks.start, blocks.stop)
    live, flags = model.live[part], model.flags[part]
    used, others = flags & FLAG_USED != 0, int((flags & FLAG_OTHER != 0).sum())
    spans: list[Span] = [(f" blocks {blocks[0]:,}–{blocks[-1]:,}  ", muted)]
    num_blocks = int((flags & FLAG_NULL == 0).sum())
    spans.append((f"{int(used.sum())} of {num_blocks} used", text))
    if others:
        spans.append((f"  {others} {_others(model)}", text))
    if used.any():
        shares = live[used] / max(model.block_size, 1)
        at = int(used.nonzero()[0][shares.argmin()]) + blocks.start
        spans.append((f"  mean {shares.mean():4.0%}", text))
        spans.append((f"  worst {shares.min():4.0%} (block {at:,})", text))
        if len(model.owner):
            owners = len(set(model.owner[part][used].tolist()))
            spans.append((f"  {owners} owner{'s' if owners != 1 else ''}", text))
        union = reduce(or_, flags[used].tolist())
        spans += [(f"  {word}", text) for word in flag_words(union)]
    return spans
