"""Which tokens of a prompt are never evicted: what the client names, then parts of a chat.

Knows neither policies nor tables. Protected tokens count against the budget; a policy does not see
them. With B the budget and L what the policy needs at least,

1. spans that the client names are protected whole: a budget below their tokens + L counts as that
2. parts found by the configuration take a quarter of B - L less those spans, in the order of
   `Protect`: the template and the system prompt lose their end, the last user turn its beginning
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
    """`pairs` [2 m]: start, end, start, end, ... of disjoint spans, ascending. `num_tokens` in all.

    `cut`: the parts that are protected in part or not at all, for want of room.
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
    named: Spans, parts: PromptParts, wanted: Protect, budget: int, least: int
) -> Protection:
    """What is protected of a prompt of which `budget` tokens are kept, `least` for the policy.

    `named`: disjoint spans of the client.
    """
    chosen = [(name, part) for name, part in parts._asdict().items() if getattr(wanted, name)]
    ends = [end for spans in (named, *(part for _, part in chosen)) for _, end in spans]
    if not ends:
        return NOTHING
    kept = np.zeros(max(ends), dtype=np.bool_)
    for start, end in named:
        kept[start:end] = True
    room = max(0, budget - least - num_tokens(named)) // 4
    cut = []
    for name, part in chosen:
        new = np.zeros_like(kept)
        for start, end in part:
            new[start:end] = True
        ids = np.flatnonzero(new & ~kept)
        if len(ids) > room:
            cut.append(name)
            ids = ids[len(ids) - room :] if name == "last_user" else ids[:room]
        kept[ids] = True
        room -= len(ids)
    pairs = np.flatnonzero(np.diff(kept, prepend=False, append=False))
    return Protection(pairs, int(np.count_nonzero(kept)), tuple(cut))


def read_spans(value: Any) -> Spans:
    """The spans in a request's `vtoken_protect`, ascending; raises RefusedError."""
    try:
        document = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _refuse(value, f"is not JSON: {error}", SHAPE) from None
    if not isinstance(document, list):
        raise _refuse(value, "is no list of spans", SHAPE)
    flat = [*document]
    if all(isinstance(part, list) and len(part) == 2 for part in document):
        flat = [number for part in document for number in part]
    if len(flat) % 2 or any(type(number) is not int for number in flat):
        raise _refuse(value, "is no list of spans", SHAPE)
    spans = sorted(zip(flat[::2], flat[1::2], strict=True))
    last = 0
    for start, end in spans:
        if start < 0 or end <= start:
            raise _refuse([start, end], "is no span", "0 <= start < end")
        if start < last:
            raise _refuse([start, end], "overlaps another span", f"start at least {last}")
        last = end
    return tuple(spans)


def check_inside(spans: Spans, num_prompt_tokens: int) -> None:
    """Raises RefusedError where a span leaves the prompt."""
    if spans and spans[-1][1] > num_prompt_tokens:
        start, end = spans[-1]
        why = f"leaves the prompt of {num_prompt_tokens} tokens"
        raise _refuse([start, end], why, f"0 <= start < end <= {num_prompt_tokens}")


def _refuse(value: Any, why: str, bound: str) -> RefusedError:
    return RefusedError(f"{PROTECT} = {value!r} {why}", field=PROTECT, value=value, bound=bound)
