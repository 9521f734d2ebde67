"""Which tokens of a prompt are never evicted: the client's spans, then parts of a chat.

Protected tokens count against the budget; a policy does not see them. With B the budget and L the
policy's minimum budget,

1. the client's spans are always protected completely: B is raised to their tokens + L if it is less
2. so are the tools that a chat offers, which B comes on top of, and a share of the prompt is one of
   the rest: half a schema is of no use
3. the other parts that the configuration selects may take a quarter of B - L - (tokens of the
   client's spans), in the order of `Protect`. If a part does not fit, the last user turn loses its
   beginning, any other part its end
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.core.config.prompt_parts import PromptParts
from vtoken.core.config.spans import covered, num_tokens, spans_of
from vtoken.core.config.token_sequences import Span, Spans
from vtoken.wire import Protect

PROTECT = "vtoken_protect"


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
        return spans_of(self.pairs)

    def covers(self, ids: Ints) -> Bools:
        """Which of `ids` [n] are protected."""
        return covered(self.pairs, ids)


NOTHING = Protection(np.empty(0, dtype=np.int64))


def protection(
    named: Spans, parts: PromptParts, enabled: Protect, budget: int, min_budget: int
) -> Protection:
    """The protected tokens of a prompt under a `budget`, of which the policy needs `min_budget`.

    `named`: disjoint spans that are protected completely.
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
