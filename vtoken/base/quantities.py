"""Numbers and times as text, with as many digits as a reader needs."""

from __future__ import annotations


def number_text(value: float, digits: int = 3) -> str:
    """`digits`: significant ones of a fraction. Whole and large numbers are written in full."""
    is_whole = value == int(value) or abs(value) >= 10**digits
    return f"{value:.0f}" if is_whole else f"{value:.{digits}g}"


def time_text(ms: float, digits: int = 3) -> str:
    """A duration: `27.5 µs`, `8.43 ms`, `412 ms`, `17.3 s`."""
    for unit, size_ms in (("s", 1e3), ("ms", 1.0)):
        if abs(ms) >= size_ms * (1 - 0.5 * 10**-digits):
            return f"{number_text(ms / size_ms, digits)} {unit}"
    return f"{number_text(ms * 1e3, digits)} µs" if ms else "0 ms"
