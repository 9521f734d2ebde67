"""The terminal sizes at which layouts change, as CSS classes of Textual's screens."""

from __future__ import annotations

NARROW_BELOW = 100  # columns
WIDE_FROM = 140
SHORT_BELOW = 30  # lines
TALL_FROM = 45

WIDTH_CLASSES = [(0, "-narrow"), (NARROW_BELOW, "-middle"), (WIDE_FROM, "-wide")]
HEIGHT_CLASSES = [(0, "-short"), (SHORT_BELOW, "-middling"), (TALL_FROM, "-tall")]
