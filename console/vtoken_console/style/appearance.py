"""The viewer's choice of theme, colour depth, colour at all, ASCII and motion, frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vtoken_console.style.ramp import Ramp
from vtoken_console.style.themes import (
    DEPTHS,
    NAMES,
    Theme,
    guess_depth,
    guess_name,
    theme,
)


@dataclass(frozen=True, slots=True)
class Appearance:
    """`ramp_name`: of the map's live slots. `motion`: whether movements are drawn."""

    theme: Theme
    ramp_name: str
    ascii_only: bool = False
    motion: bool = True

    @property
    def ramp(self) -> Ramp:
        return self.theme.ramps[self.ramp_name]

    def with_theme(self, name: str, depth: str) -> Appearance:
        return replace(self, theme=theme(name, depth))


def choose(
    theme_name: str = "auto",
    depth: str = "auto",
    *,
    ascii_only: bool = False,
    motion: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Appearance:
    """The initial appearance; `auto` is derived from the terminal's environment.

    Raises ValueError with the value and the known values.
    """
    environ = os.environ if environ is None else environ
    if theme_name not in ("auto", *NAMES):
        raise ValueError(f"theme {theme_name!r} is unknown; known: auto, {', '.join(NAMES)}")
    if depth not in ("auto", *DEPTHS):
        raise ValueError(f"colors {depth!r} is unknown; known: auto, {', '.join(DEPTHS)}")
    name = guess_name(environ) if theme_name == "auto" else theme_name
    found = theme(name, guess_depth(environ) if depth == "auto" else depth)
    ramp = "ascii" if ascii_only else "shade" if environ.get("NO_COLOR") else "colour"
    return Appearance(found, ramp, ascii_only, motion)
