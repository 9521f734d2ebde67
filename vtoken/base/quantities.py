"""Numbers, and times as text, with as many digits as a reader needs; sizes from text."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKmMgGtT]?)(i?B)?")


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


def size_bytes(text: str) -> int:
    """The bytes of `4294967296`, `4GiB`, `512MiB` or `4GB`. As for vLLM's flags, `4G` is `4GiB` and
    `4g` is `4GB`. Raises ValueError.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] == "iB" and not match[2]):
        raise ValueError(
            f"{text!r} is not a size; expected bytes, or a size such as 4GiB or 512MiB"
        )
    letter, suffix = match[2], match[3]
    is_binary = suffix == "iB" or (suffix is None and letter.isupper())
    power = " kmgt".index(letter.lower() or " ")
    return int(float(match[1]) * (1024 if is_binary else 1000) ** power)
