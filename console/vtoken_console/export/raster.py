"""An exported SVG as PNG, with a monospaced font that this machine has.

Knows no app. Textual's SVG asks for a font from the web; a picture that must not depend on the
network names one found here instead.
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


class PngUnavailable(RuntimeError):  # noqa: N818 - says what is missing
    """No PNG can be made here; the message says what to install."""


def find_font() -> tuple[Path, str]:
    """A monospaced font file with block and box glyphs, and its family name."""
    for name in FONT_NAMES:
        for folder in FONT_DIRS:
            for path in sorted(Path(folder).expanduser().rglob(name)):
                return path, FAMILIES[name.partition(".")[0].partition("-")[0]]
    raise PngUnavailable("no monospaced font found; install DejaVu Sans Mono (fonts-dejavu-core)")


def svg_to_png(svg: str, *, zoom: float = 1.0) -> bytes:
    """PNG bytes of Textual's SVG; raises PngUnavailable naming what is missing."""
    try:
        import resvg_py
    except ImportError:
        raise PngUnavailable("resvg-py is not installed; pip install 'vtoken[png]'") from None
    path, family = find_font()
    # A cell is 1.22 em high, the block glyphs of these fonts 1.16: larger letters close the gap.
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
    """The same picture in 256 colours, a third of the bytes, where Pillow is installed."""
    try:
        from PIL import Image
    except ImportError:
        return png
    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()
