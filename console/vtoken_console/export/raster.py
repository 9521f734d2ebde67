"""Converts an exported SVG to PNG with a monospaced font of this machine.

Textual's SVG refers to a web font; it is replaced with a local one, so no network is needed.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

FONT_NAMES = (
    "DejaVuSansMono.ttf",
    "LiberationMono-Regular.ttf",
    "NotoSansMono-Regular.ttf",
    "Menlo.ttc",
)
FONT_DIRS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
)
FAMILIES = {
    "DejaVuSansMono": "DejaVu Sans Mono",
    "LiberationMono": "Liberation Mono",
    "NotoSansMono": "Noto Sans Mono",
    "Menlo": "Menlo",
}


class PngUnavailable(RuntimeError):  # noqa: N818 - named for the condition
    """PNG export is unavailable; the message names what to install."""


def find_font() -> tuple[Path, str]:
    """The file and family name of a monospaced font with block and box glyphs."""
    for name in FONT_NAMES:
        for folder in FONT_DIRS:
            for path in sorted(Path(folder).expanduser().rglob(name)):
                return path, FAMILIES[name.partition(".")[0].partition("-")[0]]
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
    return _with_palette(
        bytes(
            resvg_py.svg_to_bytes(
                svg_string=svg,
                zoom=zoom,
                font_files=files,
                skip_system_fonts=True,
                monospace_family=family,
                font_family=family,
            )
        )
    )


def _with_palette(png: bytes) -> bytes:
    """Reduces the image to 256 colours, a third of the bytes, if Pillow is installed."""
    try:
        from PIL import Image
    except ImportError:
        return png
    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()
