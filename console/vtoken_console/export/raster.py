"""Converts an exported SVG to PNG with a monospaced font of this machine.

Textual's SVG refers to a web font; it is replaced with a local one, so no network is needed.
"""

from __future__ import annotations

import re
from pathlib import Path

FONTS = {  # family by file name
    "DejaVuSansMono.ttf": "DejaVu Sans Mono",
    "LiberationMono-Regular.ttf": "Liberation Mono",
    "NotoSansMono-Regular.ttf": "Noto Sans Mono",
    "Menlo.ttc": "Menlo",
}
FONT_DIRS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
)


class PngUnavailable(RuntimeError):  # noqa: N818 - named for the condition
    """PNG export is unavailable; the message names what to install."""


def find_font() -> tuple[Path, str]:
    """The file and family name of a monospaced font with block and box glyphs."""
    for name, family in FONTS.items():
        for folder in FONT_DIRS:
            for path in sorted(Path(folder).expanduser().rglob(name)):
                return path, family
    raise PngUnavailable("no monospaced font found; install DejaVu Sans Mono (fonts-dejavu-core)")


def svg_to_png(svg: str, *, zoom: float = 1.0) -> bytes:
    """Converts Textual's SVG to PNG; raises PngUnavailable."""
    try:
        import resvg_py
    except ImportError:
        raise PngUnavailable("resvg-py is not installed; pip install 'vtoken[png]'") from None
    path, family = find_font()
    # A cell is 1.22 em high, these fonts' block glyphs 1.16: a larger font closes the gap.
    svg = svg.replace("font-size: 20px", "font-size: 21px")
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family:[^;]*;", f"font-family: '{family}';", svg)
    bold = path.with_name(path.name.replace("Mono.ttf", "Mono-Bold.ttf"))
    files = [str(p) for p in (path, bold) if p.exists()]
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg,
            zoom=zoom,
            font_files=files,
            skip_system_fonts=True,
            monospace_family=family,
            font_family=family,
        )
    )
