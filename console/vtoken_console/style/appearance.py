"""The viewer's choice of theme, colour depth, ramp, ASCII and motion, as a frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vtoken_console.style.ramp import Ramp
from vtoken_console.style.themes import (
    DEPTHS,
    NAMES,
    Theme,
    choices,
    guess_depth,
    guess_name,
    theme,
)


@dataclass(frozen=True, slots=True)
class Appearance:
    """`ramp_name`: the ramp of utilisation. `motion`: whether movements are drawn."""

    theme: Theme
    ramp_name: str
    ascii_only: bool = False
    motion: bool = True

    @property
    def ramp(self) -> Ramp:
        return self.theme.ramps[self.ramp_name]

    @property
    def ramp_names(self) -> tuple[str, ...]:
        """The ramps that the viewer can choose."""
        return ("ascii",) if self.ascii_only else choices(self.theme)

    def with_ramp(self, name: str) -> Appearance:
        return replace(self, ramp_name=name)

    def with_theme(self, name: str, depth: str) -> Appearance:
        """A copy with another theme; keeps the ramp if the theme has it."""
        other = replace(self, theme=theme(name, depth))
        kept = self.ramp_name in other.ramp_names
        return other if kept else replace(other, ramp_name=other.ramp_names[0])


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
    ramp = choices(found)[0]
    if ascii_only:
        ramp = "ascii"
    elif environ.get("NO_COLOR"):
        ramp = "shade"
    return Appearance(found, ramp, ascii_only, motion)
