"""Cells and ramps: exact mean and worst, every block shown once, readable without hue."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken_console.style import cells, palette
from vtoken_console.style import grid as grid_of
from vtoken_console.style.appearance import Appearance, choose
from vtoken_console.style.ramp import FREE_LEVEL, LEVELS, luminance, ramps
from vtoken_console.style.words import BLOCK_STATES
from vtoken_console.widgets.heatmap import cell_paint
from vtoken_console.widgets.heatmap.cell_paint import PHASES, CellPainter
from vtoken_console.widgets.heatmap.colouring import MODES, Mode

RAMPS = ramps()
SIZE = 16
BLOCKS = st.lists(st.tuples(st.integers(0, SIZE), st.booleans()), min_size=1, max_size=80)


@given(BLOCKS, st.integers(1, 9))
def test_mean_and_worst_agree_with_a_plain_loop(
    blocks: list[tuple[int, bool]], per_cell: int
) -> None:
    live = np.array([n if used else 0 for n, used in blocks], np.uint16)
    flags = np.array([int(used) for _, used in blocks], np.uint8)
    found = cells.summarize(live, flags, SIZE, per_cell)
    groups = [blocks[i : i + per_cell] for i in range(0, len(blocks), per_cell)]
    assert len(found.mean) == len(groups)
    for cell, group in enumerate(groups):
        shares = [n / SIZE for n, used in group if used]
        assert found.num_used[cell] == len(shares)
        if shares:
            assert found.mean[cell] == pytest.approx(sum(shares) / len(shares))
            assert found.worst[cell] == pytest.approx(min(shares))
        else:
            assert math.isnan(found.mean[cell])
            assert math.isnan(found.worst[cell])


def test_flags_of_a_cell_are_the_union() -> None:
    found = cells.summarize(np.zeros(3, np.uint16), np.array([1, 3, 9], np.uint8), SIZE, 2)
    assert found.flags.tolist() == [3, 9]


@given(st.integers(1, 80_000), st.integers(1, 200), st.integers(1, 80))
def test_pool_grid_fits_the_widget_and_shows_every_block_once(
    num_blocks: int, width: int, height: int
) -> None:
    grid = grid_of.fit_pool(num_blocks, width, height)
    assert grid.lines <= height
    assert grid.columns * grid.cell_width <= width
    assert grid.num_cells * grid.per_cell >= num_blocks
    assert sum(len(grid.blocks_of(c)) for c in range(grid.num_cells)) == num_blocks
    assert grid.cell_of_block(num_blocks - 1) == grid.num_cells - 1


@given(st.integers(1, 500), st.integers(4, 120), st.integers(1, 40))
def test_every_drawn_cell_is_found_at_its_position(
    num_blocks: int, width: int, height: int
) -> None:
    grid = grid_of.fit_pool(num_blocks, width, height)
    for cell in range(grid.num_cells):
        row, column = divmod(cell, grid.columns)
        assert grid.cell_at(column * grid.cell_width, row * grid.cell_height) == cell
    assert grid.cell_at(grid.columns * grid.cell_width, 0) is None


@pytest.mark.parametrize(("width", "height"), [(78, 9), (66, 18), (134, 27), (198, 50)])
@pytest.mark.parametrize("num_blocks", [1, 10, 100, 300])
def test_small_pool_fills_a_large_widget(num_blocks: int, width: int, height: int) -> None:
    grid = grid_of.fit(grid_of.Zoom.POOL, num_blocks, width, height, SIZE)
    assert grid.per_cell == 1
    assert grid.cell_height <= grid.cell_width <= grid_of.MAX_ASPECT * grid.cell_height
    assert grid.lines <= height
    assert grid.columns * grid.cell_width <= width
    enough = num_blocks * grid_of.text_width(SIZE) <= width * height * 0.8
    assert grid.cell_width >= grid_of.text_width(SIZE) or not enough
    if height > 10:
        assert num_blocks * grid.cell_area >= 0.65 * width * height


FULL, PLAIN = choose(depth="truecolor", environ={}), choose(ascii_only=True, environ={})


def painter_of(
    look: Appearance, mode: Mode, size: tuple[int, int], *, roomy: bool, has_ids: bool
) -> CellPainter:
    return CellPainter(look.theme, look.ramp, mode, *size, roomy, has_ids, True, look.ascii_only)


def test_large_cell_shows_its_blocks_id_above_its_live_count() -> None:
    painter = painter_of(FULL, Mode.UTILISATION, (8, 3), roomy=True, has_ids=True)
    codes = cell_paint.pack(2, mean=[4, FREE_LEVEL], mark=[3, 0], live=[13, 0]).tolist()
    rows = ["".join(text for text, _ in painter.row(codes, y, 41)) for y in range(3)]
    assert rows == ["41    f 42      ", "   13      ·    ", "▀▀▀▀▀▀▀ ▀▀▀▀▀▀▀ "]
    painter = painter_of(PLAIN, Mode.UTILISATION, (8, 3), roomy=True, has_ids=True)
    rows = ["".join(text for text, _ in painter.row(codes[:1], y, 41)) for y in range(3)]
    assert rows == ["41    f ", "---13-- ", "------- "]


@given(st.floats(0, 1))
def test_levels_are_within_one_level_of_the_share(share: float) -> None:
    level = int(cells.levels(np.array([share], np.float32))[0])
    assert abs(level - share * (LEVELS - 1)) <= 1


def test_only_exact_ends_reach_the_ends_of_the_ramp() -> None:
    shares = np.array([0, 0.001, 0.999, 1, np.nan], np.float32)
    assert cells.levels(shares).tolist() == [0, 1, LEVELS - 2, LEVELS - 1, FREE_LEVEL]


DEFICIENCY = {
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", DEFICIENCY)
@pytest.mark.parametrize("name", [n for n, r in RAMPS.items() if r.colors])
def test_ends_and_middle_differ_for_colour_blind_readers(name: str, kind: str) -> None:
    def seen(color: str) -> np.ndarray:
        srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        return np.clip(np.array(DEFICIENCY[kind]) @ linear, 0, 1)

    colors = RAMPS[name].colors
    low, middle, high = (seen(colors[i]) for i in (0, LEVELS // 2, LEVELS - 1))
    free = seen(RAMPS[name].free_color)
    for a, b in ((low, middle), (middle, high), (low, high), (high, free), (low, free)):
        contrast = (0.05 + max(a @ LUMA, b @ LUMA)) / (0.05 + min(a @ LUMA, b @ LUMA))
        assert contrast > 1.35


LUMA = np.array([0.2126, 0.7152, 0.0722])


def test_ascii_ramp_is_ascii() -> None:
    assert RAMPS["ascii"].glyphs.isascii()
    assert all(len(r.glyphs) == LEVELS for r in RAMPS.values())


@given(
    st.integers(1, 1200),
    st.integers(4, 120),
    st.integers(4, 40),
    st.sampled_from([8, 16, 128]),
    st.sampled_from(MODES),
    st.booleans(),
)
def test_painted_rows_are_as_wide_as_their_cells(
    num_blocks: int, width: int, height: int, block_size: int, mode: Mode, is_free: bool
) -> None:
    grid = grid_of.fit_pool(num_blocks, width, height)
    roomy = grid.per_cell == 1 and grid.cell_width >= grid_of.text_width(block_size)
    count = min(grid.columns, grid.num_cells)
    fields = {"kind": 3, "kinds": 1} if mode.is_kind and not is_free else {}
    codes = cell_paint.pack(
        count,
        mean=FREE_LEVEL if is_free else 4,
        worst=3,
        mark=2,
        live=block_size,
        move=np.arange(count) % 4,
        phase=np.arange(count) % PHASES,
        cursor=np.arange(count) == count - 1,
        **fields,
    )
    size, has_ids = (grid.cell_width, grid.cell_height), grid_of.has_ids(grid, block_size)
    for appearance in (FULL, PLAIN):
        painter = painter_of(appearance, mode, size, roomy=roomy, has_ids=has_ids)
        for line in range(grid.cell_height):
            spans = painter.row(codes.tolist(), line)
            text = "".join(text for text, _ in spans)
            assert len(text) == count * grid.cell_width
            assert text.isascii() or not appearance.ascii_only


@given(
    st.integers(0, 18), st.integers(0, 3), st.integers(0, 3), st.integers(0, 65535), st.booleans()
)
def test_every_field_of_a_code_survives_packing(
    level: int, mark: int, move: int, number: int, cursor: bool
) -> None:
    codes = cell_paint.pack(
        2, mean=level, worst=18 - level, mark=mark, move=move, kind=number, live=[0, number]
    ) | cell_paint.pack(2, cursor=cursor)
    first, second = (cell_paint.unpack(code) for code in codes.tolist())
    assert (first.mean, first.worst, first.mark) == (level, 18 - level, mark)
    assert (second.move, second.kind, second.live) == (move, number, number)
    assert (first.live, first.cursor) == (0, int(cursor))


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 7),
)
def test_a_cell_has_a_kind_only_when_all_its_counted_blocks_share_it(
    blocks: list[tuple[int, bool]], per_cell: int
) -> None:
    kind = np.array([k for k, _ in blocks], np.uint16)
    counted = np.array([c for _, c in blocks], bool)
    found, number = cells.kinds(kind, counted, per_cell)
    for cell, first in enumerate(range(0, len(blocks), per_cell)):
        kinds = {k for k, c in blocks[first : first + per_cell] if c}
        assert number[cell] == len(kinds)
        if len(kinds) == 1:
            assert found[cell] == kinds.pop()
        else:
            assert found[cell] == cells.MIXED


def test_a_dim_cell_keeps_its_amount_in_a_fainter_colour() -> None:
    codes = cell_paint.pack(2, mean=LEVELS - 1, worst=LEVELS - 1, dim=[0, 1]).tolist()
    (clear, bright), (dim, faint) = painter_of(
        FULL, Mode.UTILISATION, (2, 1), roomy=False, has_ids=False
    ).row(codes, 0)
    assert clear == dim == "  "
    assert luminance(bright.bgcolor.get_truecolor().hex) > luminance(
        faint.bgcolor.get_truecolor().hex
    )
    plain = painter_of(PLAIN, Mode.UTILISATION, (2, 1), roomy=False, has_ids=False)
    assert [text for text, _ in plain.row(codes, 0)] == ["##", "##"]


@pytest.mark.parametrize(
    ("sign", "text"), [({"mark": 2}, " s"), ({"move": cell_paint.DESTINATION}, "• ")]
)
def test_a_sign_makes_no_hole_in_a_bar_without_colour(sign: dict[str, int], text: str) -> None:
    shade = choose(depth="16", environ={})
    painter = painter_of(shade, Mode.UTILISATION, (2, 1), roomy=False, has_ids=False)
    ((shown, style),) = painter.row(cell_paint.pack(1, mean=LEVELS - 1, **sign).tolist(), 0)
    assert shown == text
    assert style is palette.INVERSE_STYLE


@given(st.integers(1, 80_000), st.integers(10, 180), st.integers(4, 45), st.sampled_from([16, 128]))
def test_zooming_in_never_shows_more_blocks_and_always_ends(
    num_blocks: int, width: int, height: int, block_size: int
) -> None:
    pool = grid_of.fit_pool(num_blocks, width, height)
    zoom: grid_of.Zoom | None = grid_of.Zoom.POOL
    per_cell = pool.per_cell
    steps = 0
    while zoom is not None:
        grid = grid_of.fit(zoom, num_blocks, width, height, block_size)
        assert grid.per_cell <= per_cell
        assert grid.columns * grid.cell_width <= max(width, grid.cell_width)
        per_cell, steps = grid.per_cell, steps + 1
        zoom = grid_of.next_zoom(zoom, pool, block_size)
    assert per_cell == 1
    assert steps <= 3


def is_in(state: str, live: int, flags: int) -> bool:
    """`words.BLOCK_STATES` for a single block."""
    bits = {"shared": 2, "cached": 4, "moving": 8, "filling": 16, "other": 32}
    if state in bits:
        return bool(flags & bits[state])
    if state == "free":
        return flags == 0
    holds = {"live": live > 0, "dead": live < SIZE and not flags & 16, "low": live <= SIZE // 2}
    return flags & 1 != 0 and holds[state]


@pytest.mark.parametrize("state", dict.fromkeys([*BLOCK_STATES, *cells.STATES]))
def test_states_match_their_descriptions(state: str) -> None:
    pairs = [(0, 0), (0, 32), (0, 64)] + [
        (n, 1 | bits << 1) for n in range(SIZE + 1) for bits in range(16)
    ]
    live = np.array([n for n, _ in pairs], np.uint16)
    flags = np.array([f for _, f in pairs], np.uint8)
    found = cells.STATES[state](live, flags, SIZE)
    assert found.tolist() == [is_in(state, n, f) for n, f in pairs]
