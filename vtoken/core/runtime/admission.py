"""Admission: the free blocks that a waiting request requires, by what it holds after eviction.

Uses the runtime's state, not the engine's queue: the engine's block manager calls `requirement`
and `peak_tokens`, and reports `record_demand` and `admitted`. With S the block size and
L = budget + interval, a request with P tokens to compute and at most T in total needs at its peak,
in tokens:

  prompt:  min(P, L + chunk) if eviction runs between the chunks of the prompt, else P
  output:  min(T, L + 1) if eviction runs during decoding, else T - P + what the prompt keeps, and
           the most drafts of a step

Layers with a window, chunks or a state take blocks of the same pool (`other_groups`). What a
request needs at its peak is the greater of two sums over all groups, that of its prompt and that of
its output: a window holds more while a chunk is computed.

Invariant: when a request is admitted, the blocks that running requests may still take up to their
peaks stay free, and so does the headroom for relocation. So no running request is preempted for one
admitted later, as long as reclamation keeps up. A request that evicts nothing counts as in vLLM, by
its prompt alone. An idle pool, and one that only sessions hold, admits any request that fits.

Under `evict_when: pressure`, blocks that running requests can still give (`givable_blocks`) need
not be free: they are there when a running request grows. What the new request takes at once must be
free, so it waits until others have given that (`shortage`). It asks only for what can be given: a
request that does not fit even then waits for an end, and nobody loses a token for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.giving import Givers
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.engine_shape import EngineShape
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_table import TokenTable

SHORTAGE_VALID_STEPS = 8


@dataclass(frozen=True, slots=True)
class Requirement:
    """What must be free when a waiting request starts, besides the blocks that it takes.

    `extra_blocks`: this many blocks stay free. `reserves`: whether it leaves blocks to running
    requests and to relocation.
    """

    extra_blocks: int = 0
    reserves: bool = False


NO_REQUIREMENT = Requirement()


@dataclass(frozen=True, slots=True)
class Demand:
    """What the first waiting request lacked when the engine last tried to start it, at `step`.

    `needed_blocks` must be free at once besides the headroom, `withheld_blocks` of them for vLLM's
    watermark. `missing_blocks` were not. `reserves`: as in its `Requirement`.
    """

    step: int
    request_id: str = ""
    needed_blocks: int = 0
    withheld_blocks: int = 0
    missing_blocks: int = 0
    reserves: bool = False


NO_DEMAND = Demand(-SHORTAGE_VALID_STEPS)


class Admission:
    """Counts the blocks that admitted requests may still take."""

    def __init__(
        self,
        shape: EngineShape,
        store: BlockStore,
        requests: Requests,
        active: ActiveConfig,
        current: CurrentStep,
        others: OtherGroups,
    ) -> None:
        self._shape = shape
        self._store = store
        self._requests = requests
        self._active = active
        self._current = current
        self._others = others
        self._outstanding: tuple[int, int] = (-1, 0)  # step, blocks
        self._admitted_step = -1
        self._demand = NO_DEMAND
        self._givable: tuple[int, int] = (-1, 0)  # step, blocks

    def forget(self, request_id: str) -> None:
        self._end_demand(request_id)

    def _end_demand(self, request_id: str) -> None:
        if self._demand.request_id == request_id:
            self._demand = NO_DEMAND

    def peak_tokens(self, request_id: str, num_tokens: int, num_cached: int = 0) -> int:
        """Tokens that need places before the request may start.

        `num_tokens`: its prompt, as vLLM counts; `num_cached` of them are in the prefix cache and
        all held until the first chunk is computed.
        """
        rules = self._requests.rules(request_id)
        return self._prompt_peak(rules, num_tokens, num_cached)

    def requirement(self, request_id: str, num_tokens: int, other_blocks: int = 0) -> Requirement:
        """What must be free when `request_id` starts and takes the blocks of `num_tokens`, and
        `other_blocks` in other groups.
        """
        config = self._active.config
        own_rules = self._requests.own_rules
        is_alone = all(own_rules(name).session for name in self._requests.held)
        idle = is_alone and self._admitted_step != self._current.number
        if idle or not self.reserves(config):
            return NO_REQUIREMENT
        taken = self._blocks(num_tokens) + other_blocks
        growth = max(0, self._peak_blocks(request_id) - taken)
        future = growth + self._outstanding_blocks() + config.headroom_blocks
        extra = max(config.headroom_blocks, future - self.givable_blocks())
        return Requirement(extra, reserves=True)

    def record_demand(
        self,
        request_id: str,
        num_blocks: int,
        requirement: Requirement = NO_REQUIREMENT,
        *,
        withheld_blocks: int = 0,
    ) -> None:
        """Record that the waiting `request_id` takes `num_blocks` free blocks under `requirement`.

        The engine withholds `withheld_blocks` more from it. A shortage also opens the gates if
        blocks are withheld or the request waits for what others will hold.
        """
        free = self._store.num_free_blocks()
        missing = max(0, num_blocks + requirement.extra_blocks + withheld_blocks - free)
        if self._demand.step != self._current.number or missing > self._demand.missing_blocks:
            self._demand = Demand(
                self._current.number,
                request_id,
                num_blocks + withheld_blocks,
                withheld_blocks,
                missing,
                reserves=requirement.reserves,
            )
        if missing and (requirement.extra_blocks or withheld_blocks):
            self._current.want_blocks(missing + withheld_blocks)

    @property
    def demand(self) -> Demand | None:
        """The demand of the first waiting request; None if it lacks nothing.

        The engine does not try in every step, for instance after a preemption; a result is valid
        for `SHORTAGE_VALID_STEPS`.
        """
        demand = self._demand
        fresh = self._current.number - demand.step <= SHORTAGE_VALID_STEPS
        return demand if fresh and demand.missing_blocks else None

    def num_prompt_tokens(self, request_id: str) -> int:
        """The tokens that a waiting request computes before it decodes."""
        arrival = self._requests.announced.get(request_id)
        return 0 if arrival is None else arrival.num_prompt_tokens

    def oldest_wait_s(self, now: float) -> float:
        """How long the request that waits longest has waited; 0 if none waits. `now`: monotonic."""
        held = self._requests.held
        since = [
            request.waits_since
            for name, request in self._requests.announced.items()
            if name not in held and not request.is_check
        ]
        return now - min(since, default=now)

    def reserves(self, config: VTokenConfig) -> bool:
        """Whether a waiting request leaves blocks to running ones and to relocation."""
        reclaims = config.reclamation == "auto" and config.experiment.admission != "stock"
        return reclaims and self._requests.may_evict

    def reserved_blocks(self, demand: Demand, config: VTokenConfig, growth_blocks: int) -> int:
        """What the request of `demand` leaves to running ones under `config`, which take
        `growth_blocks` before it is tried again.
        """
        if not demand.reserves:
            return growth_blocks
        return growth_blocks + self.future_blocks(demand.request_id, config)

    def patience_left_s(self, demand: Demand, now: float, config: VTokenConfig) -> float:
        """How much longer the request of `demand` waits under `config` before others give; at most
        0: not longer.
        """
        arrival = self._requests.announced.get(demand.request_id)
        if arrival is None:
            return 0.0
        return arrival.waits_since + config.evict_after_wait_ms / 1000 - now

    def future_blocks(self, request_id: str | None, config: VTokenConfig) -> int:
        """What running requests will take until their peaks under `config`, and the headroom; with
        what the waiting `request_id` will take after its prompt, if given.
        """
        if not self.reserves(config):
            return 0
        growth = sum(self._growth(table, config) for table in self._requests.tables)
        arrival = None if request_id is None else self._requests.announced.get(request_id)
        if request_id is not None and arrival is not None:
            prompt = arrival.num_prompt_tokens
            taken = self._blocks(prompt) + self.most_other_blocks(
                prompt, self._shape.max_chunk_tokens
            )
            growth += max(0, self._peak_blocks(request_id, config) - taken)
        return growth + config.headroom_blocks

    def peaks_of_another(self, request_id: str, config: VTokenConfig) -> tuple[int, int] | None:
        """The most blocks of a new request like `request_id` under `config`, and the most after its
        prompt; None if it would evict nothing.
        """
        arrival, rules = (
            self._requests.announced.get(request_id),
            self._requests.rules(request_id, config),
        )
        if arrival is None or not self._compresses(rules):
            return None
        prompt, total = arrival.num_prompt_tokens, arrival.max_tokens
        later = self._later_blocks(rules, prompt, total)
        return max(self._prompt_blocks(rules, prompt), later), later

    def givable_blocks(self) -> int:
        """Blocks that running requests can give until each is at its floor."""
        step, blocks = self._givable
        if step != self._current.number:
            blocks = self.givable_now()
            self._givable = self._current.number, blocks
        return blocks

    def givable_now(self) -> int:
        """`givable_blocks` of this moment, before and after some gave in a step."""
        givers = self.givers(self._requests.giving_rows())
        return int(givers.most_blocks(self._shape.block_size).sum())

    def can_give(self) -> bool:
        """Whether a request could give a block now."""
        return self.givable_now() > 0

    def givers(self, rows: Ints) -> Givers:
        """The facts of the `rows` [k] that may give."""
        tables = self._requests.tables
        columns = tables.columns
        forgotten = np.zeros_like(rows)
        if self._requests.forgotten:
            for i in np.flatnonzero(self._requests.are_forgetting(rows)).tolist():
                forgotten[i] = len(self._requests.forgotten_ids(tables.at(rows[i])))
        return Givers(
            columns.num_live[rows],
            columns.num_tokens[rows],
            self._requests.due.floor[rows],
            tables.num_private_blocks(rows),
            self._requests.due.priority[rows],
            np.maximum(1, -(-self._requests.due.interval[rows] // self._shape.block_size)),
            forgotten,
            self._shape.max_drafts,
        )

    def admitted(self, request_id: str, num_blocks: int) -> None:
        """`request_id` was admitted in the step being planned and has taken `num_blocks` in all
        groups.
        """
        self._admitted_step = self._current.number
        self._end_demand(request_id)
        if self._requests.may_evict:
            growth = max(0, self._peak_blocks(request_id) - num_blocks)
            self._outstanding = self._current.number, self._outstanding_blocks() + growth

    def _outstanding_blocks(self) -> int:
        step, blocks = self._outstanding
        if step != self._current.number:
            blocks = sum(map(self._growth, self._requests.tables))
            self._outstanding = self._current.number, blocks
        return blocks

    def _growth(self, table: TokenTable, config: VTokenConfig | None = None) -> int:
        request_id = table.request_id
        held = table.num_blocks + sum(group.held_blocks(request_id) for group in self._others)
        return max(0, self._peak_blocks(request_id, config) - held)

    def _peak_blocks(self, request_id: str, config: VTokenConfig | None = None) -> int:
        """The most blocks of all groups that the request will hold from now on; 0 if it evicts
        nothing.
        """
        arrival = self._requests.announced.get(request_id)
        rules = self._requests.rules(request_id, config)
        if arrival is None or not self._compresses(rules):
            return 0
        request = self._requests.held.get(request_id)
        prompt = arrival.num_prompt_tokens if request is None else request.prefill_end
        table = self._requests.tables.get(request_id)
        prefilling = table is None or table.num_tokens < prompt
        first = self._prompt_blocks(rules, prompt) if prefilling else 0
        return max(first, self._later_blocks(rules, prompt, arrival.max_tokens))

    def _prompt_blocks(self, rules: VTokenConfig, prompt: int) -> int:
        """The most blocks of all groups while a prompt of `prompt` tokens is computed."""
        own = self._blocks(self._prompt_peak(rules, prompt))
        return own + self.most_other_blocks(prompt, self._shape.max_chunk_tokens)

    def _later_blocks(self, rules: VTokenConfig, prompt: int, max_tokens: int) -> int:
        """The most blocks of all groups after it."""
        own = self._blocks(self._later_peak(rules, prompt, max_tokens))
        return own + self.most_other_blocks(max_tokens, 1)

    def most_other_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds in the other groups."""
        in_flight = chunk_tokens * (1 + self._shape.report_lag_steps)
        return sum(group.most_blocks(num_tokens, in_flight) for group in self._others)

    def _later_peak(self, rules: VTokenConfig, prompt: int, max_tokens: int) -> int:
        """The most tokens live at once after a prompt of `prompt` tokens."""
        limit, drafts = self._limit(rules), self._shape.max_drafts
        if rules.evict_during != "prefill":
            return min(max_tokens, limit + 1) + drafts
        return (prompt if prompt <= limit else rules.budget_tokens) + max_tokens - prompt + drafts

    def _prompt_peak(self, rules: VTokenConfig, num_tokens: int, num_cached: int = 0) -> int:
        """The most tokens live at once while a prompt of `num_tokens` is computed."""
        # A policy that profiles needs the entire prompt.
        keeps_prompt = rules.evict_during == "decode" or rules.policy.profiles
        if keeps_prompt or not self._compresses(rules):
            return num_tokens
        chunk = self._shape.max_chunk_tokens
        lag = 0 if rules.policy.reads is None else self._shape.report_lag_steps
        return min(num_tokens, max(self._limit(rules), num_cached + lag * chunk) + chunk)

    def _compresses(self, rules: VTokenConfig) -> bool:
        return (
            rules.experiment.admission == "compressed"
            and rules.evicts
            and rules.reclamation == "auto"
            and rules.policy not in self._active.suspended
        )

    def _limit(self, rules: VTokenConfig) -> int:
        return rules.budget_tokens + rules.interval_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._shape.block_size)
