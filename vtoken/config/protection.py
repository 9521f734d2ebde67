"""Which tokens of a prompt are never evicted: the client's spans, then parts of a chat.

Protected tokens count against the budget; a policy does not see them. With B the budget and L the
policy's minimum budget,

1. the client's spans are always protected completely: B is raised to their tokens + L if it is less
2. the parts that the configuration selects may take a quarter of B - L - (tokens of those spans),
   in the order of `Protect`. If a part does not fit, the template and the system prompt lose their
   end, the last user turn loses its beginning
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.arrays import Ints
from vtoken.bounds import read_json
from vtoken.config.prompt_parts import PromptParts, Span, Spans
from vtoken.errors import RefusedError
from vtoken.wire import Protect

PROTECT = "vtoken_protect"
SHAPE = "[[start, end], ...] as text, or start, end, ... as integers"


@dataclass(frozen=True, slots=True, eq=False)
class Protection:
    """The protected spans of one prompt, `num_tokens` in all.

    `pairs` [2 m]: start, end, start, end, ... of disjoint spans, ascending. `cut`: the parts that
    do not fit and are protected partly or not at all.
    """

    pairs: Ints
    num_tokens: int = 0
    cut: tuple[str, ...] = ()

    def spans(self) -> list[Span]:
        return [(int(start), int(end)) for start, end in self.pairs.reshape(-1, 2)]

    def covers(self, ids: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of `ids` [n] are protected."""
        covered: np.ndarray[Any, np.dtype[np.bool_]] = (
            np.searchsorted(self.pairs, ids, side="right") % 2 == 1
        )
        return covered


NOTHING = Protection(np.empty(0, dtype=np.int64))


def num_tokens(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def protection(
    named: Spans, parts: PromptParts, enabled: Protect, budget: int, min_budget: int
) -> Protection:
    """The protected tokens of a prompt under a `budget`, of which the policy needs `min_budget`.

    `named`: disjoint spans of the client.
    """
    chosen = [(name, part) for name, part in parts._asdict().items() if getattr(enabled, name)]
    ends = [end for spans in (named, *(part for _, part in chosen)) for _, end in spans]
    if not ends:
        return NOTHING
    protected = np.zeros(max(ends), dtype=np.bool_)
    for start, end in named:
        protected[start:end] = True
    quota = max(0, budget - min_budget - num_tokens(named)) // 4
    cut = []
    for name, part in chosen:
        new = np.zeros_like(protected)
        for start, end in part:
            new[start:end] = True
        ids = np.flatnonzero(new & ~protected)
        if len(ids) > quota:
            cut.append(name)
            ids = ids[len(ids) - quota :] if name == "last_user" else ids[:quota]
        protected[ids] = True
        quota -= len(ids)
    pairs = np.flatnonzero(np.diff(protected, prepend=False, append=False))
    return Protection(pairs, int(np.count_nonzero(protected)), tuple(cut))


def read_spans(value: Any) -> Spans:
    """The spans in a request's `vtoken_protect`, ascending; raises RefusedError."""
    try:
        document = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _refuse(value, f"is not JSON: {error}", SHAPE) from None
    if not isinstance(document, list):
        raise _refuse(value, "is not a list of spans", SHAPE)
    flat = [*document]
    if all(isinstance(part, list) and len(part) == 2 for part in document):
        flat = [number for part in document for number in part]
    if len(flat) % 2 or any(type(number) is not int for number in flat):
        raise _refuse(value, "is not a list of spans", SHAPE)
    spans = sorted(zip(flat[::2], flat[1::2], strict=True))
    last = 0
    for start, end in spans:
        if start < 0 or end <= start:
            raise _refuse([start, end], "is not a span", "0 <= start < end")
        if start < last:
            raise _refuse([start, end], "overlaps another span", f"start at least {last}")
        last = end
    return tuple(spans)


def check_inside(spans: Spans, num_prompt_tokens: int) -> None:
    """Raises RefusedError if a span leaves the prompt."""
    if spans and spans[-1][1] > num_prompt_tokens:
        start, end = spans[-1]
        why = f"leaves the prompt of {num_prompt_tokens} tokens"
        raise _refuse([start, end], why, f"0 <= start < end <= {num_prompt_tokens}")


def _refuse(value: Any, why: str, bound: str) -> RefusedError:
    return RefusedError(f"{PROTECT} = {value!r} {why}", field=PROTECT, value=value, bound=bound)
