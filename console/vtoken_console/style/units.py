"""Formats numbers with units at a fixed width, so that the layout is stable.

Every function returns plain text; `width` pads on the left and never truncates.
"""

from __future__ import annotations

from typing import Any

from vtoken import sentences
from vtoken.base.quantities import time_text


def count(value: float, width: int = 0) -> str:
    """An integer with thousands separators: 5,427."""
    return f"{round(value):,}".rjust(width)


def short_count(value: float, width: int = 5) -> str:
    """A count in at most five columns: 982, 12.3k, 4.1M."""
    number = float(value)
    for suffix in ("", "k", "M", "G"):
        if abs(number) < (10_000 if suffix == "" else 999.5):
            text = f"{number:.0f}" if suffix == "" or number >= 99.95 else f"{number:.1f}"
            return f"{text}{suffix}".rjust(width)
        number /= 1000
    return f"{number:.0f}T".rjust(width)


def brief_count(value: float, width: int) -> str:
    """A count with separators if it fits `width` columns, else a short one."""
    text = count(value)
    return text if len(text) <= width else short_count(value, width).strip()


def data_size(num_bytes: float, width: int = 0) -> str:
    """Bytes in decimal units: 1.9 MB."""
    return sentences.data_size(num_bytes).rjust(width)


def change_text(changes: dict[str, list[Any]]) -> str:
    """Changes of the configuration as text: theta_f 0.4 → 0.25, planner pack → plug."""
    return sentences.change_text(changes, "→")


def duration(seconds: float) -> str:
    """A duration: 8 s, 2 min 05 s, 3 h 12 min."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def latency(ms: float | None, width: int = 7) -> str:
    """A latency in seven columns: `8.43 ms`, `412 ms`, `1.24 s`; a dash for None."""
    return ("–" if ms is None else time_text(ms)).rjust(width)


def percent(ratio: float | None, width: int = 6) -> str:
    """A share in six columns: ` 12.3%`; a dash for None."""
    return ("–" if ratio is None else f"{ratio * 100:.1f}%").rjust(width)


def nats(value: float | None, width: int = 6) -> str:
    """A difference of log-probabilities: ` 0.132`; a dash for None."""
    return ("–" if value is None else f"{value:.3f}").rjust(width)


def fit(text: str, width: int) -> str:
    """`text` truncated with an ellipsis, or padded, to exactly `width` columns."""
    if width <= 0:
        return ""
    if len(text) <= width:
        return text.ljust(width)
    return text[: width - 1] + "…"
