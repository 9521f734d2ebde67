"""The demand book: the blocks that requests need in the next steps, at their peaks, and can give.

Whoever admits and whoever shares out a shortage ask this book, so both count alike. With S the
block size and L = budget + interval, a request with P tokens to compute and at most T in total
needs at its peak, in tokens:

  prompt:  min(P, L + chunk) if eviction runs between the chunks of the prompt, else P
  output:  min(T, L + 1) if eviction runs during decoding, else T - P + what the prompt keeps, and
           the most drafts of a step

and behind both the places in which a drafter's layers compute.

Layers with a window, chunks or a state take blocks of the same pool (`other_groups`). What a
request needs is a sum over all groups; only the group with token tables can give. A request's peak
is the greater of its prompt's and its output's: a window holds more while a chunk is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.planning.giving import Givers
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_table import TokenTable
from vtoken.wire import MAX_TOKENS

AHEAD_STEPS = 2
NOTHING_GIVEN: Mapping[str, int] = {}


class Growth(NamedTuple):
    """The blocks that requests take in the coming step, and in `AHEAD_STEPS` steps."""

    now: int
    soon: int


class Peaks(NamedTuple):
    """The most blocks that a request holds from its arrival on, and after its prompt."""

    first: int
    later: int


@dataclass(eq=False)
class DemandBook:
    """The blocks that the requests of one runtime need."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _others: OtherGroups

    # ------------------------------------------------------------ the next steps

    def growth(self, decoding: Ints, prefilling: Sequence[tuple[str, int]]) -> Growth:
        """What the rows `decoding` take, and `prefilling`, by name the size of their next chunk."""
        chunks, now = self.of_chunks(prefilling), self.of_decoding(decoding, 1)
        soon = max(now, self.of_decoding(decoding, AHEAD_STEPS))
        return Growth(now + chunks, soon + chunks)

    def growth_of_all(self) -> Growth:
        """What all running requests take, if each computes as much as it can."""
        requests, tables, chunk = (
            self._requests,
            self._requests.tables,
            self._shape.max_chunk_tokens,
        )
        rows = tables.all_rows
        if requests.idle:
            rows = np.setdiff1d(rows, tables.rows_of([*requests.idle]))
        left = requests.left_of_prompts(rows)
        prefilling = zip(rows[left > 0].tolist(), left[left > 0].tolist(), strict=True)
        chunks = [(tables.names[row], min(num_left, chunk)) for row, num_left in prefilling]
        return self.growth(rows[left <= 0], chunks)

    def of_decoding(self, rows: Ints, steps: int) -> int:
        """What `rows` take in `steps` steps if every draft is accepted."""
        tables, max_drafts = self._requests.tables, self._shape.max_drafts
        # A hole may take the next token, if its block is writable and no draft follows.
        recycling = self._active.config.recycles and not max_drafts
        num_new = np.full_like(rows, steps * (1 + max_drafts) + self._shape.lookahead)
        own = tables.growth(rows, num_new, recycling=recycling)
        if not self._others:
            return int(own.sum())
        taking, tokens = own > 0, tables.columns.num_tokens[rows]
        for group in self._others:  # most requests stay within their last block
            taking |= -(-(tokens + num_new) // group.block_size) > -(-tokens // group.block_size)
        return self._in_all_groups(rows[taking], own[taking], num_new[taking], steps)

    def of_chunks(self, chunks: Sequence[tuple[str, int]]) -> int:
        """What the next `chunks`, of prompts or of drafts, take, by name how many tokens;
        `max_step_tokens` tokens at most.
        """
        tables, num_left = self._requests.tables, self._shape.max_step_tokens
        rows: list[int] = []
        sizes: list[int] = []
        for name, num_new in chunks:
            row = tables.rows.get(name)
            if row is not None and num_left > 0:
                rows.append(row)
                size = min(num_new, num_left)
                sizes.append(size + self._shape.lookahead)
                num_left -= size
        if not rows:
            return 0
        chosen, taken = np.array(rows, dtype=np.int64), np.array(sizes, dtype=np.int64)
        own = tables.growth(chosen, taken, recycling=False)
        return self._in_all_groups(chosen, own, taken, 1)

    def _in_all_groups(self, rows: Ints, own: Ints, num_new: Ints, steps: int) -> int:
        """Blocks that `rows` [k] take for `num_new` [k] tokens in `steps` steps, `own` [k] of them
        in the managed group.

        What a request's windows give back serves that request alone: others may come before it.
        """
        taken, names = own.copy(), self._requests.tables.names
        if len(rows):
            chosen = [names[row] for row in rows.tolist()]
            for group in self._others:
                taken += group.growth(chosen, num_new, steps)
        return int(np.maximum(0, taken).sum())

    def bound(self, steps: int) -> int:
        """A bound of what running requests take in `steps` steps, with every prompt completed."""
        rows, size = self._requests.tables.all_rows, self._shape.block_size
        left, shape = self._requests.left_of_prompts(rows), self._shape
        tokens = steps * (1 + shape.max_drafts) + shape.lookahead
        own = len(rows) * (1 + tokens // size) + int(np.maximum(left, 0).sum()) // size
        return own + self._bound_of_others(rows, left, tokens)

    def _bound_of_others(self, rows: Ints, left: Ints, num_new: int) -> int:
        """A bound of what other groups take for `rows` [k] to complete the `left` [k] tokens of
        their prompts and to compute `num_new` tokens each.
        """
        if not self._others:
            return 0
        most, tables = 0, self._requests.tables
        tokens = tables.columns.num_tokens[rows] + np.maximum(left, 0) + num_new
        for group in self._others:
            blocks = -(-tokens // group.block_size)
            for chosen, chunk in ((left > 0, self._shape.max_chunk_tokens), (left <= 0, 1)):
                limit = group.most_blocks(MAX_TOKENS, self._in_flight(chunk))
                most += int(np.minimum(blocks[chosen], limit).sum())
        # All but the null block.
        held = self._shape.geometry.num_blocks - 1 - self._store.num_free_blocks()
        return max(0, most - (held - tables.pool.num_used))

    # ------------------------------------------------------------ peaks

    def peaks(self, rules: VTokenConfig, prompt: int, max_tokens: int) -> Peaks | None:
        """The peaks of a request under `rules`; None if it evicts nothing."""
        if not self._compresses(rules):
            return None
        limit, ahead = rules.budget_tokens + rules.interval_tokens, self._shape.next_places - 1
        if rules.evict_during == "prefill":
            kept = prompt if prompt <= limit else rules.budget_tokens
            later = kept + max_tokens - prompt
        else:
            later = min(max_tokens, limit + 1)
        blocks_of, chunk = self._shape.blocks_of, self._shape.max_chunk_tokens
        later_blocks = blocks_of(later + ahead) + self.most_of_others(max_tokens, 1)
        first_blocks = blocks_of(self.prompt_tokens(rules, prompt) + self._shape.lookahead)
        first_blocks += self.most_of_others(prompt, chunk)
        return Peaks(max(first_blocks, later_blocks), later_blocks)

    def peaks_of(self, request_id: str, config: VTokenConfig | None = None) -> Peaks | None:
        """The peaks of a known request from its arrival on."""
        request = self._requests.announced.get(request_id)
        if request is None:
            return None
        rules = self._requests.rules(request_id, config)
        return self.peaks(rules, request.num_prompt_tokens, request.max_tokens)

    def most_blocks(self, request_id: str, config: VTokenConfig | None = None) -> int:
        """The most blocks that the request will hold from now on; 0 if it evicts nothing."""
        requests = self._requests
        request, held = requests.announced.get(request_id), requests.held.get(request_id)
        if request is None:
            return 0
        prompt = request.num_prompt_tokens if held is None else held.prefill_end
        peaks = self.peaks(requests.rules(request_id, config), prompt, request.max_tokens)
        if peaks is None:
            return 0
        computed = 0 if held is None else requests.tables[request_id].num_tokens
        return peaks.first if computed < prompt else peaks.later

    def until_peaks(
        self, config: VTokenConfig | None = None, given: Mapping[str, int] = NOTHING_GIVEN
    ) -> int:
        """What running requests will take until their peaks, once they have `given` so many blocks,
        by name.
        """
        return sum(
            max(
                0,
                self.most_blocks(table.request_id, config)
                - self._num_held(table)
                + given.get(table.request_id, 0),
            )
            for table in self._requests.tables
        )

    def _num_held(self, table: TokenTable) -> int:
        others = sum(group.held_blocks(table.request_id) for group in self._others)
        return table.num_blocks + others

    def prompt_tokens(self, rules: VTokenConfig, num_tokens: int, num_cached: int = 0) -> int:
        """The most tokens live at once while a prompt of `num_tokens` is computed; `num_cached` of
        them are in the prefix cache and all held until the first chunk is computed.
        """
        # A policy that profiles needs the entire prompt.
        keeps_prompt = rules.evict_during == "decode" or rules.policy.profiles
        if keeps_prompt or not self._compresses(rules):
            return num_tokens
        limit, chunk = rules.budget_tokens + rules.interval_tokens, self._shape.max_chunk_tokens
        lag = 0 if rules.policy.reads is None else self._shape.report_lag_steps
        return min(num_tokens, max(limit, num_cached + lag * chunk) + chunk)

    def most_of_others(self, num_tokens: int, chunk_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds in the other groups."""
        in_flight = self._in_flight(chunk_tokens)
        return sum(group.most_blocks(num_tokens, in_flight) for group in self._others)

    def _in_flight(self, chunk_tokens: int) -> int:
        return chunk_tokens * (1 + self._shape.report_lag_steps)

    def _compresses(self, rules: VTokenConfig) -> bool:
        return (
            rules.experiment.admission == "compressed"
            and rules.evicts
            and rules.reclamation == "auto"
            and rules.policy not in self._active.suspended
        )

    # ------------------------------------------------------------ what can be given

    def givable_blocks(self) -> int:
        """Blocks that running requests can give until each is at its floor."""
        return int(self.givers(self._requests.giving_rows()).most_blocks().sum())

    def givers(
        self, rows: Ints, floor: Ints | None = None, config: VTokenConfig | None = None
    ) -> Givers:
        """The facts of the `rows` [k] that may give, under `config`; `floor` [k]: other floors.

        A request gives at most `evict_per_token_left` tokens for each token that it is expected to
        compute until its end, in whole blocks, besides forgotten ones: what has little left returns
        all its blocks soon. That is enough for its own growth.
        """
        requests, tables = self._requests, self._requests.tables
        columns, due = tables.columns, requests.due
        forgotten = np.zeros_like(rows)
        for i in np.flatnonzero(requests.are_forgetting(rows)).tolist():
            forgotten[i] = len(requests.forgotten_ids(tables.at(rows[i])))
        per_token = (config or self._active.config).evict_per_token_left
        most = self._shape.blocks_of(per_token * requests.expected_left(rows))
        kept = columns.num_live[rows] - np.maximum(most * self._shape.block_size, forgotten)
        return Givers(
            columns.num_live[rows],
            columns.num_tokens[rows],
            np.maximum(due.floor[rows] if floor is None else floor, kept),
            tables.num_private_blocks(rows),
            due.priority[rows],
            np.maximum(1, self._shape.blocks_of(due.interval[rows])),
            forgotten,
            self._shape,
        )
