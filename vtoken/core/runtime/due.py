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

import numpy as np

from vtoken.base.arrays import Bools, Ints, Ragged
from vtoken.core.config.protection import NOTHING, Protection
from vtoken.core.config.values import VTokenConfig
from vtoken.core.runtime import kernels
from vtoken.wire import MAX_TOKENS

NEVER = MAX_TOKENS << 1
COLUMNS = (
    "limit", "floor", "target", "interval", "prefill_end", "in_prefill", "in_decode", "waits",
)  # fmt: skip


def phases(rules: VTokenConfig) -> tuple[int, bool, bool]:
    """budget + interval of `rules`, whether they evict in prefill, and whether in decode.

    The first is `NEVER` where nothing is due by its length alone.
    """
    by_length = rules.evicts and rules.evict_when == "always"
    limit = rules.budget_tokens + rules.interval_tokens if by_length else NEVER
    return limit, rules.evict_during != "decode", rules.evict_during != "prefill"


class DueColumns:
    """By row: `limit` = budget + interval; `floor` = budget of requests that give under pressure,
    of others `NEVER`; `target`: the live tokens that a due request is cut down to; the interval,
    the phases, the prompt's end, and `waits`: the request had no scores at its prompt's end.
    `protection`: only rows that protect tokens.
    """

    def __init__(self) -> None:
        self.limit: Ints = np.zeros(0, dtype=np.int64)
        self.floor: Ints = np.zeros(0, dtype=np.int64)
        self.target: Ints = np.zeros(0, dtype=np.int64)
        self.interval: Ints = np.zeros(0, dtype=np.int64)
        self.prefill_end: Ints = np.zeros(0, dtype=np.int64)
        self.in_prefill: Bools = np.zeros(0, dtype=np.bool_)
        self.in_decode: Bools = np.zeros(0, dtype=np.bool_)
        self.waits: Bools = np.zeros(0, dtype=np.bool_)
        self.protection: dict[int, Protection] = {}

    def admit(
        self, row: int, rules: VTokenConfig, prefill_end: int, protection: Protection
    ) -> None:
        """Set the columns of a new request that computes `prefill_end` tokens before it decodes."""
        if row >= len(self.limit):
            for name in COLUMNS:
                old = getattr(self, name)
                grown = np.zeros(max(8, 2 * row), dtype=old.dtype)
                grown[: len(old)] = old
                setattr(self, name, grown)
        self.prefill_end[row] = prefill_end
        self.waits[row] = False
        self.set_rules(row, rules, protection)

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

    def protected(self, rows: Ints) -> Ragged:
        """The protected spans of each of `rows` [k], as (start, end) pairs."""
        if not self.protection:
            return Ragged.empty(len(rows))
        found = (self.protection.get(row, NOTHING) for row in rows.tolist())
        return Ragged.joined([protection.pairs for protection in found])

    def select(self, rows: Ints, num_live: Ints, num_tokens: Ints) -> Ints:
        """Those of `rows` [k] that are due by length; `num_live`, `num_tokens` by row."""
        return self._longer_than(self.limit, rows, num_live, num_tokens)

    def above_floor(self, rows: Ints, num_live: Ints, num_tokens: Ints) -> Ints:
        """Those of `rows` [k] that may give tokens under pressure now; otherwise as `select`."""
        return self._longer_than(self.floor, rows, num_live, num_tokens)

    def _longer_than(self, limit: Ints, rows: Ints, num_live: Ints, num_tokens: Ints) -> Ints:
        out = np.empty(len(rows), dtype=np.int64)
        found = kernels.select_due(
            rows, num_live, num_tokens, self.prefill_end, self.waits,
            limit, self.in_prefill, self.in_decode, out,
        )  # fmt: skip
        return out[:found]
