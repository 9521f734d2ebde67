"""Spans of token ids that a client names: [start, end), disjoint and ascending."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.base.errors import refused
from vtoken.core.config.token_sequences import Span, Spans
from vtoken.wire.bounds import read_json

SHAPE = "[[start, end], ...] as text, or start, end, ... as integers"


def num_tokens(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def pairs_of(spans: Spans) -> Ints:
    """start, end, start, end, … [2 m]."""
    return np.array([*chain.from_iterable(spans)], dtype=np.int64)


def spans_of(pairs: Ints) -> list[Span]:
    """The spans of `pairs_of`."""
    return [(int(start), int(end)) for start, end in pairs.reshape(-1, 2)]


def covered(pairs: Ints, ids: Ints) -> Bools:
    """Which of `ids` [n] are inside the disjoint, ascending spans `pairs` [2 m]."""
    inside: Bools = np.searchsorted(pairs, ids, side="right") % 2 == 1
    return inside


def merged(first: Spans, second: Spans) -> Spans:
    """All tokens of both."""
    out: list[Span] = []
    for start, end in sorted((*first, *second)):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return tuple(out)


def read_spans(value: Any, field: str) -> Spans:
    """The spans in the argument `field`, ascending; raises RefusedError."""
    try:
        document = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise refused(field, value, f"is not JSON: {error}", SHAPE) from None
    if not isinstance(document, list):
        raise refused(field, value, "is not a list of spans", SHAPE)
    flat = [*document]
    if all(isinstance(part, list) and len(part) == 2 for part in document):
        flat = [number for part in document for number in part]
    if len(flat) % 2 or any(type(number) is not int for number in flat):
        raise refused(field, value, "is not a list of spans", SHAPE)
    spans = sorted(zip(flat[::2], flat[1::2], strict=True))
    last = 0
    for start, end in spans:
        if start < 0 or end <= start:
            raise refused(field, [start, end], "is not a span", "0 <= start < end")
        if start < last:
            bound = f"start at least {last}"
            raise refused(field, [start, end], "overlaps another span", bound)
        last = end
    return tuple(spans)


def check_inside(spans: Spans, num_tokens: int, field: str, whole: str = "prompt") -> None:
    """Raises RefusedError if a span leaves the `whole`, of `num_tokens` tokens."""
    if spans and spans[-1][1] > num_tokens:
        why = f"leaves the {whole} of {num_tokens} tokens"
        bound = f"0 <= start < end <= {num_tokens}"
        raise refused(field, [*spans[-1]], why, bound)


def check_apart(forgotten: Spans, protected: Spans, field: str) -> None:
    """Raises RefusedError if a token is both forgotten and protected."""
    for start, end in forgotten:
        for first, last in protected:
            if start < last and first < end:
                raise refused(
                    field,
                    [start, end],
                    f"overlaps the protected span {[first, last]}, whose tokens never die",
                    "spans without a protected token",
                )
