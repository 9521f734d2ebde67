"""Options that several commands have in common, and the types of their values.

A type is a function of the text; the ValueError that it raises is told behind the option's name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from click import Argument, IntRange, Option

if TYPE_CHECKING:
    from vtoken.wire import Guard

MAX_DURATION_S = 7 * 24 * 3600
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)?")

COUNT, POSITIVE = IntRange(min=0), IntRange(min=1)


def duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1h` or `250ms`; a bare number is seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; expected 90s, 5m, 1h or 250ms")
    seconds = float(match[1]) * UNITS_MS[match[2] or "s"] / 1000
    if not 0 < seconds <= MAX_DURATION_S:
        raise ValueError(f"{text} is out of range; expected above 0, at most 7d")
    return seconds


def whole_seconds(text: str) -> int:
    """Whole seconds of a duration."""
    seconds = duration_s(text)
    if seconds != int(seconds):
        raise ValueError(f"{text} is not a whole number of seconds")
    return int(seconds)


def interval_s(text: str) -> float:
    """Seconds between two states."""
    return _within(duration_s(text), 0.04, 10.0)


def fps(text: str) -> float:
    """States a second."""
    return _within(float(text), 0.1, 30.0)


def _within(value: float, minimum: float, maximum: float) -> float:
    if not minimum <= value <= maximum:  # nor is NaN
        raise ValueError(f"{value:g} is not in {minimum:g}..{maximum:g}")
    return value


def size(text: str) -> tuple[int, int]:
    """Columns and lines of `120x36`."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and 0 < int(width) * int(height) <= 1_000_000):
        raise ValueError(f"{text!r} is not WIDTHxHEIGHT, like 120x36")
    return int(width), int(height)


def guard(text: str) -> Guard:
    """`preemptions>0`, `canary_agreement{group=evicting}<0.9 over 30`; the engine checks it."""
    from vtoken.wire.guards import parse_guard  # here, so that `--help` does not load the table

    return parse_guard(text)


def p95_guard(text: str) -> Guard:
    """The guard on an inter-token latency of `40ms` or `0.04s`; the unit is required."""
    if text[-1:].isdigit():
        raise ValueError(f"{text!r} has no unit; expected {text}ms or {text}s")
    return guard(f"latency_seconds{{kind=inter_token,quantile=0.95}}>{duration_s(text):.15g}")


# ---------------------------------------------------------------- as a help page has them


def option(names: str, metavar: str, text: str, **more: Any) -> Option:
    """An option with a value; `names`: those of the command line, and the function's own."""
    return Option(names.split(), metavar=metavar, help=text, **more)


def flag(names: str, text: str) -> Option:
    return Option(names.split(), is_flag=True, help=text)


def argument(name: str, metavar: str, text: str, **more: Any) -> Argument:
    return Argument([name], metavar=metavar, help=text, **more)


SERVER = (
    option("--url", "URL", "the server (env VTOKEN_URL, default http://127.0.0.1:8000)"),
    option("--token-file", "FILE", "file with the bearer token (env VTOKEN_TOKEN)"),
    option(
        "--cafile",
        "FILE",
        "the server's certificate or its authority's, in PEM (env VTOKEN_CAFILE)",
    ),
    flag("-v --verbose", "of a refusal, also field, value and bound; of doctor, every check"),
)
ENGINE = option("--engine", "N", "one engine of a server with several (changes: all)", type=COUNT)
JSON = flag("--json as_json", "JSON, one document a line")
FLEET = option("--fleet", "FILE", "the servers: URL [name=NAME] [token-file=FILE] a line")
EVERY = (
    flag(
        "--all every",
        "every engine of every server, as a table; exit code 1 if they differ or one fails",
    ),
    FLEET,
)
NEWEST = option("-n --limit", "N", "newest N (20)", type=POSITIVE, default=20)
DRY_RUN = flag("--dry-run", "report the effect and change nothing; needs a read token only")
IF_REVISION = option("--if-revision revision", "N", "only if N is still the revision", type=COUNT)
TRIAL = (
    option(
        "--confirm-within confirm_within_s",
        "T",
        "on trial: reverted unless confirmed with `vtoken confirm` within T: 90s, 5m",
        type=whole_seconds,
    ),
    option(
        "--guard guards",
        "GUARD",
        "on trial: reverted if a metric crosses a limit: 'preemptions>0', "
        "'canary_agreement{group=evicting}<0.9 over 30', 'rate(generated_tokens)<100'; "
        "metrics: docs/metrics.md",
        type=guard,
        multiple=True,
    ),
    option(
        "--guard-p95 p95_guards",
        "T",
        "on trial: reverted if the p95 inter-token latency exceeds T: 40ms",
        type=p95_guard,
        multiple=True,
    ),
    option("--guard-for guard_for_s", "T", "how long the guards are active", type=whole_seconds),
    option(
        "--canary-engine",
        "N",
        "change engine N first; the others follow when its guards have held",
        type=COUNT,
    ),
)
CHANGES = (*EVERY, DRY_RUN, *TRIAL)  # of a change that may be on trial, on every server
