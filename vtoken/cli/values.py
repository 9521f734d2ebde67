"""Parsers of argument values: durations with units, KEY=VALUE pairs, bounded numbers."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken.wire import Guard

MIN_FPS, MAX_FPS = 0.1, 30.0
MAX_DURATION_S = 7 * 24 * 3600
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)?")


def duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1h` or `250ms`; a bare number is seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; expected 90s, 5m, 1h or 250ms"
        )
    seconds = float(match[1]) * UNITS_MS[match[2] or "s"] / 1000
    if not 0 < seconds <= MAX_DURATION_S:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected above 0, at most 7d")
    return seconds


def whole_seconds(text: str) -> int:
    """Whole seconds of a duration."""
    seconds = duration_s(text)
    if seconds != int(seconds):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of seconds")
    return int(seconds)


def positive(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def number(text: str) -> float:
    """A finite number; the server checks its bounds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def guard(text: str) -> Guard:
    """`preemptions>0`, `canary_agreement{group=evicting}<0.9 over 30`; the engine checks it."""
    from vtoken.wire.guards import parse_guard  # here, so that `--help` does not load msgspec

    try:
        return parse_guard(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def p95_guard(text: str) -> Guard:
    """The guard on an inter-token latency of `40ms` or `0.04s`; the unit is required."""
    from vtoken.wire import Guard

    if text[-1:].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; expected {text}ms or {text}s")
    return Guard(metric="latency_seconds{kind=inter_token,quantile=0.95}", above=duration_s(text))


def fps(text: str) -> float:
    return _within(number(text), MIN_FPS, MAX_FPS)


def interval_s(text: str) -> float:
    """Seconds between two states."""
    return _within(duration_s(text), 0.04, 10.0)


def _within(value: float, minimum: float, maximum: float) -> float:
    if not minimum <= value <= maximum:
        raise argparse.ArgumentTypeError(f"{value:g} is not in {minimum:g}..{maximum:g}")
    return value


def assignments(pairs: list[str]) -> dict[str, Any]:
    """`a.b=1 c=text` as {"a": {"b": 1}, "c": "text"}: a value is JSON, else text.

    Raises ValueError for a pair that is not KEY=VALUE or repeats a key.
    """
    tree: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise ValueError(f"{pair!r} is not KEY=VALUE")
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ValueError(f"{key!r} is given twice")
        if path[-1] in node:
            raise ValueError(f"{key!r} is given twice")
        try:
            node[path[-1]] = json.loads(text)
        except ValueError:
            node[path[-1]] = text
        except RecursionError:
            raise ValueError(f"{key}: the value nests too deep") from None
    return tree


def size(text: str) -> tuple[int, int]:
    """Columns and lines of `120x36`."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and 0 < int(width) * int(height) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, like 120x36")
    return int(width), int(height)


def port(text: str) -> int:
    return int(_within(count(text), 1, 65535))
