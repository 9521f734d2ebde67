"""Themes: readable text, and monotonic ramps at every colour depth."""

from __future__ import annotations

import itertools

import pytest
from rich.color import Color, ColorSystem

from vtoken_console.style import palette, themes
from vtoken_console.style.appearance import choose
from vtoken_console.style.ramp import LEVELS, luminance
from vtoken_console.style.themes import DEPTHS, NAMES, Theme, theme

THEMES = [theme(name, depth) for name in NAMES for depth in DEPTHS]
INKS = ("STRONG", "TEXT", "MUTED", "FAINT", "KEY", "GOOD", "WARN", "BAD", "DEAD", "PARKED", "THETA")
GROUNDS = ("BACKGROUND", "BAR_BACKGROUND", "NOTICE_BACKGROUND")


def sent(color: str, depth: str) -> str:
    """The colour that a terminal of this depth shows."""
    triplet = Color.parse(color).downgrade(themes.SYSTEMS[depth]).get_truecolor()
    return f"#{triplet.red:02x}{triplet.green:02x}{triplet.blue:02x}"


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("one", THEMES, ids=lambda t: t.full_name)
def test_text_is_readable_on_every_ground(one: Theme) -> None:
    bad = []
    for ink, ground in itertools.product(INKS, GROUNDS):
        pair = [one.color(getattr(palette, name)) for name in (ink, ground)]
        shown = pair if one.depth == "16" else [sent(color, one.depth) for color in pair]
        if contrast(*shown) < 4.5:
            bad.append((ink, ground, round(contrast(*shown), 2)))
    assert bad == []


@pytest.mark.parametrize("one", THEMES, ids=lambda t: t.full_name)
def test_cursor_selection_and_warnings_are_readable(one: Theme) -> None:
    styles = (
        palette.CURSOR_STYLE,
        palette.SELECTED_STYLE,
        palette.CURSOR_CELL_STYLE,
        palette.BLURRED_CELL_STYLE,
        palette.style("#000000", palette.WARN),
        palette.style("#000000", palette.BAD),
    )
    for style in styles:
        shown = one.resolve(style)
        assert shown.color is not None
        assert shown.bgcolor is not None
        pair = (shown.color.get_truecolor().hex, shown.bgcolor.get_truecolor().hex)
        assert contrast(*pair) >= 4.5, style


@pytest.mark.parametrize("one", THEMES, ids=lambda t: t.full_name)
def test_ramps_stay_strictly_monotonic_as_the_terminal_shows_them(one: Theme) -> None:
    for ramp in one.ramps.values():
        if not ramp.colors:
            continue
        assert len(ramp.colors) == LEVELS
        values = [luminance(sent(color, one.depth)) for color in ramp.colors]
        steps = [b - a for a, b in itertools.pairwise(values)]
        assert all(s > 0 for s in steps) or all(s < 0 for s in steps)
        assert sent(ramp.free_color, one.depth) not in {sent(c, one.depth) for c in ramp.colors}


@pytest.mark.parametrize("one", THEMES, ids=lambda t: t.full_name)
def test_a_theme_of_few_colours_uses_only_those(one: Theme) -> None:
    if one.depth == "256":
        colors = [
            *one.roles.values(),
            *one.hues,
            *(c for r in one.ramps.values() for c in r.colors),
        ]
        for color in colors:
            number = Color.parse(color).downgrade(ColorSystem.EIGHT_BIT).number
            assert number is not None
            assert number >= 16, color
    if one.depth == "16":
        assert not any(ramp.colors for ramp in one.ramps.values())


def test_owner_hues_are_seven_different_colours_in_every_theme() -> None:
    for one in THEMES:
        assert len(one.hues) == 7
        if one.depth != "16":
            assert len({sent(hue, one.depth) for hue in one.hues}) == 7


def test_no_ramp_or_hue_colour_equals_a_role() -> None:
    roles = set(theme("light", "truecolor").roles)
    for one in THEMES:
        used = {*one.hues, *(c for r in one.ramps.values() for c in r.colors)}
        assert not used & roles


def test_a_style_without_a_role_is_left_as_it_is() -> None:
    cell = palette.style("#ffffff", "#2f6fb5")
    assert theme("light", "truecolor").resolve(cell) == cell


@pytest.mark.parametrize(
    ("environ", "name", "depth"),
    [
        ({"COLORTERM": "truecolor", "TERM": "xterm"}, "dark", "truecolor"),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, "light", "256"),
        ({"TERM": "xterm-256color", "COLORFGBG": "15;0"}, "dark", "256"),
        ({"TERM": "linux"}, "dark", "16"),
        ({}, "dark", "16"),
    ],
)
def test_appearance_follows_the_terminal(environ: dict[str, str], name: str, depth: str) -> None:
    appearance = choose(environ=environ)
    assert (appearance.theme.name, appearance.theme.depth) == (name, depth)


def test_no_color_and_ascii_choose_glyphs() -> None:
    assert choose(environ={"NO_COLOR": "1", "COLORTERM": "truecolor"}).ramp.colors == ()
    assert choose(ascii_only=True, environ={"COLORTERM": "truecolor"}).ramp.glyphs.isascii()


@pytest.mark.parametrize(("theme_name", "depth"), [("blue", "auto"), ("auto", "88")])
def test_unknown_themes_and_depths_are_refused_by_name(theme_name: str, depth: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown; known: auto"):
        choose(theme_name, depth)


@pytest.mark.parametrize(("plain", "name"), [(False, "colour"), (True, "ascii")])
def test_another_theme_keeps_glyphs_or_colours(*, plain: bool, name: str) -> None:
    appearance = choose("dark", "truecolor", ascii_only=plain, environ={})
    for other in (appearance, appearance.with_theme("light", "256")):
        assert other.ramp is other.theme.ramps[name]
    assert appearance.with_theme("light", "16").ramp.colors == ()
