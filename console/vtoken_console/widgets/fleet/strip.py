"""An engine's pool in one line of cells, painted as the heatmap's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.ramp import FREE_LEVEL, OTHER_LEVEL
from vtoken_console.widgets.heatmap.colouring import Mode
from vtoken_console.widgets.lines import Line, merge

if TYPE_CHECKING:
    from vtoken_console.frame.fleet import FleetRow
    from vtoken_console.widgets.heatmap.cell_paint import CellPainter


class Strips:
    """Paints and keeps the strip of each row until its state, width or theme changes."""

    def __init__(self) -> None:
        self._painter: CellPainter | None = None
        self._look: tuple[object, ...] = ()
        self._kept: dict[object, tuple[int, Line]] = {}

    def strip(self, row: FleetRow, view: View, width: int) -> Line:
        """Exactly `width` columns."""
        from vtoken_console.widgets.heatmap.cell_paint import CellPainter

        look = (view.theme, view.ramp, view.ascii_only, width)
        if look != self._look:
            self._look, self._kept = look, {}
            self._painter = CellPainter(
                view.theme, view.ramp, Mode.UTILISATION, ascii_only=view.ascii_only
            )
        found = self._kept.get(row.key)
        if found is None or found[0] != row.version:
            assert self._painter is not None
            line = _paint(row, self._painter, width)
            self._kept[row.key] = found = row.version, line
        return found[1]


def _paint(row: FleetRow, painter: CellPainter, width: int) -> Line:
    import numpy as np

    from vtoken.wire import FLAG_OTHER
    from vtoken_console.style import cells
    from vtoken_console.widgets.heatmap.cell_paint import pack

    blank = (" " * width, palette.TEXT_STYLE)
    live, flags = row.blocks.get("live"), row.blocks.get("flags")
    if live is None or flags is None or not len(live):
        return (blank,)
    per_cell = -(-len(live) // width)
    found = cells.summarize(live, flags, row.model.block_size, per_cell)
    mean = cells.levels(found.mean)
    other = cells.count_cells((flags & FLAG_OTHER) != 0, per_cell) > 0
    mean = np.where((mean == FREE_LEVEL) & other, OTHER_LEVEL, mean)
    codes = pack(len(mean), mean=mean, worst=cells.levels(found.worst))
    return merge([*painter.row(codes.tolist(), 0), (blank[0][: width - len(mean)], blank[1])])
