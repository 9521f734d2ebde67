"""Which requests are due for eviction under their rules, as columns by row.

Independent of policies' choices and of blocks. A request is due when more than budget + interval of
its tokens are live, in the phases of its rules:

    decode    its prompt is computed and its first token sampled
    prefill   between the chunks of its prompt
    the end of the prompt belongs to both; a request without scores at that point stays due
"""

from __future__ import annotations

import numpy as np

from vtoken.arrays import Bools, Ints, Ragged
from vtoken.config.protection import NOTHING, Protection
from vtoken.config.values import VTokenConfig
from vtoken.runtime import kernels
from vtoken.wire import MAX_TOKENS

NEVER = MAX_TOKENS << 1


def phases(rules: VTokenConfig) -> tuple[int, bool, bool]:
    """budget + interval of `rules`, whether they evict in prefill, and whether in decode."""
    limit = rules.budget_tokens + rules.interval_tokens if rules.evicts else NEVER
    return limit, rules.evict_during != "decode", rules.evict_during != "prefill"


class DueColumns:
    """By row: `limit` = budget + interval, `budget`, the phases, the prompt's end, and `waits`: the
    request had no scores at its prompt's end. `protection`: only rows that protect tokens.
    """

    def __init__(self) -> None:
        self.limit: Ints = np.zeros(0, dtype=np.int64)
        self.budget: Ints = np.zeros(0, dtype=np.int64)
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
            for name in ("limit", "budget", "prefill_end", "in_prefill", "in_decode", "waits"):
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
        self.budget[row] = rules.budget_tokens
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
        """Those of `rows` [k] that are due; `num_live`, `num_tokens` by row."""
        out = np.empty(len(rows), dtype=np.int64)
        found = kernels.select_due(
            rows, num_live, num_tokens, self.prefill_end, self.waits,
            self.limit, self.in_prefill, self.in_decode, out,
        )  # fmt: skip
        return out[:found]
