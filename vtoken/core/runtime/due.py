"""Which requests are due for eviction under their rules, as columns by row.

Independent of policies' choices and of blocks. Under `evict_when: always` a request is due when
more than budget + interval of its tokens are live. Under `pressure` it may give tokens as long as
more than its budget are live; `vtoken.core.runtime.shortage` decides whether it does. Both in the
phases of its rules:

    decode    its prompt is computed and its first token sampled
    prefill   between the chunks of its prompt
    the end of the prompt belongs to both; a request without scores at that point stays due
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Bools, Ints, Ragged
from vtoken.base.compiled import kernel
from vtoken.base.rows import Rows
from vtoken.core.config.protection import NOTHING, Protection
from vtoken.core.config.values import VTokenConfig
from vtoken.core.tables.columns import Columns
from vtoken.wire import MAX_TOKENS

NEVER = MAX_TOKENS << 1  # of a limit or a floor: above every number of tokens


def phases(rules: VTokenConfig) -> tuple[int, bool, bool]:
    """budget + interval of `rules`, whether they evict in prefill, and whether in decode.

    The first is `NEVER` where nothing is due by its length alone.
    """
    by_length = rules.evicts and rules.evict_when == "always"
    limit = rules.budget_tokens + rules.interval_tokens if by_length else NEVER
    return limit, rules.evict_during != "decode", rules.evict_during != "prefill"


class DueArrays(NamedTuple):
    """The array of `DueColumns`, for kernels: one record per row."""

    facts: Any


class DueColumns(Rows):
    """What decides whether a request is due, by row of the tables.

    `protection`: only rows that protect tokens.
    """

    limit: Ints  # budget + interval
    floor: Ints  # the budget of requests that give under pressure, else `NEVER`
    target: Ints  # the live tokens that a due request is cut down to
    interval: Ints
    priority: Ints  # vLLM's, lower is more important
    prefill_end: Ints  # tokens to compute before it decodes
    num_prompt: Ints  # of its prompt, whether or not its output is computed again
    max_tokens: Ints  # prompt and output at most
    in_flight: Ints  # step of its relocation that is not reported yet; 0: none
    in_prefill: Bools
    in_decode: Bools
    waits: Bools  # it had no scores at its prompt's end

    def __init__(self) -> None:
        super().__init__(unused=NEVER)
        self.protection: dict[int, Protection] = {}

    def _set(self, facts: npt.NDArray[Any]) -> None:
        super()._set(facts)
        self.arrays = DueArrays(self.records)

    def admit(
        self, row: int, prefill_end: int, *, num_prompt: int, max_tokens: int, priority: int
    ) -> None:
        """Set the columns of a new request that computes `prefill_end` tokens before it decodes;
        `set_rules` sets the others.
        """
        self.extend(row + 1)
        self.num_prompt[row], self.max_tokens[row] = num_prompt, max_tokens
        self.prefill_end[row], self.priority[row] = prefill_end, priority
        self.in_flight[row], self.waits[row] = 0, False

    def set_rules(self, row: int, rules: VTokenConfig, protection: Protection) -> None:
        """Set the rules in force for the request and the tokens they protect."""
        self.limit[row], self.in_prefill[row], self.in_decode[row] = phases(rules)
        self.floor[row] = rules.budget_tokens if rules.gives else NEVER
        self.target[row] = rules.budget_tokens
        self.interval[row] = rules.interval_tokens
        if protection.num_tokens:
            self.protection[row] = protection
        else:
            self.protection.pop(row, None)

    def release(self, row: int) -> None:
        """The request of `row` releases its blocks; its row may be reused."""
        self.clear(row)
        self.protection.pop(row, None)

    @property
    def any_by_length(self) -> bool:
        """Whether a request may become due by its length alone."""
        return bool(np.count_nonzero(self.limit < NEVER))

    def giving(self, columns: Columns) -> Ints:
        """The rows of `columns` that may give tokens under pressure, now or later."""
        out = np.empty(columns.num_rows, dtype=np.int64)
        return out[: _select_giving(columns.num_rows, columns.num_tokens, self.arrays, out)]

    def protected(self, rows: Ints) -> Ragged:
        """The protected spans of each of `rows` [k], as (start, end) pairs."""
        if not self.protection:
            return Ragged.empty(len(rows))
        found = (self.protection.get(row, NOTHING) for row in rows.tolist())
        return Ragged.joined([protection.pairs for protection in found])

    def select(self, rows: Ints, columns: Columns, *, gives: bool = False) -> Ints:
        """Those of `rows` [k] of `columns` that are due by length.

        `gives`: those that may give tokens under pressure now, and be relocated.
        """
        out = np.empty(len(rows), dtype=np.int64)
        found = _select_due(rows, gives, columns.num_live, columns.num_tokens, self.arrays, out)
        return out[:found]


# ---------------------------------------------------------------- kernels


@kernel
def is_due(
    num_live: int,
    num_tokens: int,
    prefill_end: int,
    waits: bool,
    limit: int,
    in_prefill: bool,
    in_decode: bool,
) -> bool:
    """Whether a request is due; `waits`: it had no scores at its prompt's end."""
    if num_live <= limit:
        return False
    if num_tokens == prefill_end or waits:
        return True
    return in_prefill if num_tokens < prefill_end else in_decode


@kernel
def _select_due(
    rows: Ints, gives: bool, num_live: Ints, num_tokens: Ints, dues: DueArrays, out: Ints
) -> int:
    """Write the due ones of `rows` [k] to `out` [k]; returns their number.

    `num_live`, `num_tokens`: by row. `gives`: those above their floor, not their limit, that have
    no relocation in flight. Resets `waits` where a prompt ends.
    """
    found = 0
    for j in range(len(rows)):
        r = rows[j]
        due = dues.facts[r]
        if num_tokens[r] == due.prefill_end:
            due.waits = False
        if gives and due.in_flight:
            continue
        if is_due(
            num_live[r], num_tokens[r], due.prefill_end, due.waits,
            due.floor if gives else due.limit, due.in_prefill, due.in_decode,
        ):  # fmt: skip
            out[found] = r
            found += 1
    return found


@kernel
def _select_giving(num_rows: int, num_tokens: Ints, dues: DueArrays, out: Ints) -> int:
    """Write the rows of requests that give, now or later in their lives, to `out`; returns their
    number. `num_tokens`: by row.
    """
    found = 0
    for r in range(min(num_rows, len(dues.facts))):
        due = dues.facts[r]
        if due.floor < NEVER and (due.in_decode or num_tokens[r] <= due.prefill_end):
            out[found] = r
            found += 1
    return found
