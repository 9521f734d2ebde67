"""The requests of one engine: what is known of each from its arrival on, and of those with blocks.

Independent of policies' choices and of the block store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.core.config.protection import NOTHING, Protection
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.config.spans import covered, merged, pairs_of
from vtoken.core.config.token_sequences import Spans
from vtoken.core.config.values import VTokenConfig
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.due import DueColumns
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.output_lengths import OutputLengths
from vtoken.core.tables.token_table import TokenTable
from vtoken.core.tables.token_tables import TokenTables
from vtoken.policies import Policy
from vtoken.wire import MAX_TOKENS, Geometry

NO_RULES = RequestRules()


@dataclass(slots=True)
class Announced:
    """A request from its arrival to its end.

    `num_prompt_tokens`: tokens to compute before it decodes; `max_tokens`: prompt and output at
    most. `priority`: vLLM's, lower is more important. `arrived_ts`: Unix seconds. `waits_since`:
    monotonic seconds of its arrival or of its last preemption; `waiting_since_ts`: the same in Unix
    seconds, None once it has blocks. `waited_s`: its waits that have ended. `is_check`: a request
    of the quality canary, which nobody waits for.
    """

    rules: RequestRules
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0
    is_check: bool = False
    num_preemptions: int = 0
    arrived_ts: float = field(init=False)
    waits_since: float = field(init=False)
    waiting_since_ts: float | None = field(init=False)
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.arrived_ts = self.wait_begins()

    def wait_begins(self) -> float:
        """Note that the request waits from now on; returns now, in Unix seconds."""
        now = time.time()
        self.waits_since, self.waiting_since_ts = time.monotonic(), now
        return now

    def wait_ends(self) -> None:
        self.waited_s += time.monotonic() - self.waits_since
        self.waiting_since_ts = None


class Requests:
    """`announced`: all requests by id; `held`: those that hold blocks, which have a table and a row
    in `due`.

    `forgotten`: spans of tokens that die first, of requests that have such; `num_forgets`: changes
    of it besides arrivals and ends. `output_lengths`: of requests that have ended. `own_policies`:
    of requests with their own policy. `idle`: sessions that wait for their clients now.
    `without_words(request_id, policy)` is called when a request evicts nothing because `policy`
    needs words that its prompt does not have.
    """

    def __init__(
        self,
        geometry: Geometry,
        active: ActiveConfig,
        without_words: Callable[[str, Policy], None] = lambda *_: None,
    ) -> None:
        self._active = active
        self._without_words = without_words
        self.tables = TokenTables(geometry.num_blocks, geometry.block_size)
        self.due = DueColumns()
        self._due_under: VTokenConfig | None = None  # the configuration that `due` was filled from
        self.announced: dict[str, Announced] = {}
        self.held: dict[str, HeldRequest] = {}
        self.own_policies: dict[str, Policy] = {}
        self.forgotten: dict[str, Spans] = {}
        self.num_forgets = 0
        self.output_lengths = OutputLengths()
        self.idle: frozenset[str] = frozenset()

    # ------------------------------------------------------------ arrival and end

    def announce(self, request_id: str, request: Announced) -> None:
        """A request has arrived."""
        rules = request.rules
        self.announced[request_id] = request
        if rules.policy is not None:
            self.own_policies[request_id] = rules.policy
        if rules.forget:
            self.forgotten[request_id] = rules.forget

    def admit(self, request: HeldRequest) -> None:
        """Create the table and columns of a request that gets its first blocks in this step."""
        table = self.tables.add(request.request_id)
        self.held[request.request_id] = request
        announced = self.announced.get(request.request_id)
        priority, max_tokens = 0, MAX_TOKENS
        if announced is not None:
            priority, max_tokens = announced.priority, announced.max_tokens or MAX_TOKENS
            announced.wait_ends()
        self.due.admit(
            table.row,
            request.prefill_end,
            num_prompt=request.num_prompt_tokens,
            max_tokens=max_tokens,
            priority=priority,
        )
        self._set_rules(request.request_id, table.row)

    def preempted(self, request_id: str, num_tokens: int) -> None:
        """A preempted request will compute `num_tokens` again before it decodes."""
        request = self.announced.get(request_id)
        if request is not None:
            request.num_preemptions += 1
            request.num_prompt_tokens = num_tokens
            request.wait_begins()

    def release(self, request_id: str) -> None:
        """Remove a request that releases its blocks."""
        self.due.release(self.tables.rows[request_id])
        self.tables.release(request_id)
        del self.held[request_id]

    def discard(self, request_id: str) -> None:
        """Remove what is known of a request that has ended."""
        for known in (self.announced, self.own_policies, self.forgotten):
            known.pop(request_id, None)

    # ------------------------------------------------------------ rules

    def begin_step(self) -> None:
        """Give every request with blocks its rules under the configuration of the new step."""
        if self._due_under is not self._active.config:
            self._due_under = self._active.config
            for request_id, row in self.tables.rows.items():
                self._set_rules(request_id, row)

    def _set_rules(self, request_id: str, row: int) -> None:
        self.due.set_rules(row, self.rules(request_id), self.protection(request_id))
        policy = self.own_rules(request_id).lacks_words(self._active.config)
        if policy is not None:
            self._without_words(request_id, policy)

    def own_rules(self, request_id: str) -> RequestRules:
        """The request's own rules; empty ones for an unknown request."""
        request = self.announced.get(request_id)
        return NO_RULES if request is None else request.rules

    def rules(self, request_id: str, config: VTokenConfig | None = None) -> VTokenConfig:
        """The configuration for one request; `config`: under that one instead."""
        config = self._active.config if config is None else config
        request = self.announced.get(request_id)
        return config if request is None else request.rules.under(config)

    def protection(self, request_id: str, config: VTokenConfig | None = None) -> Protection:
        """The protected tokens of a request; `config`: under that one instead."""
        request = self.announced.get(request_id)
        if request is None:
            return NOTHING
        return request.rules.protection(self._active.config if config is None else config)

    def by_policy(self, rows: Ints) -> dict[Policy, Ints]:
        """The `rows` [k] of each policy."""
        if not self.own_policies:
            return {self._active.config.policy: rows}
        found: dict[Policy, list[int]] = {}
        for row in rows.tolist():
            found.setdefault(self.rules(self.tables.names[row]).policy, []).append(row)
        return {policy: np.array(own) for policy, own in found.items()}

    @property
    def may_evict(self) -> bool:
        """Whether the configuration, or a request's own policy, may evict anything."""
        return self._active.config.evicts or bool(self.own_policies)

    @property
    def evicts_by_length(self) -> bool:
        """Whether any request may become due by its length alone, or the rules have changed."""
        return self._due_under is not self._active.config or self.due.any_by_length

    # ------------------------------------------------------------ forgotten tokens

    def forget_tokens(self, request_id: str, spans: Spans) -> None:
        """Let these tokens of an announced request die before its others."""
        self.forgotten[request_id] = merged(self.forgotten.get(request_id, ()), spans)
        self.num_forgets += 1

    def forgotten_pairs(self, request_id: str) -> Ints:
        """The forgotten spans of a request, as start, end, start, end, …"""
        return pairs_of(self.forgotten.get(request_id, ()))

    def forgotten_ids(self, table: TokenTable, config: VTokenConfig | None = None) -> Ints:
        """The live tokens of a request that die before all others, oldest first."""
        name = table.request_id
        if name not in self.forgotten:
            return NO_IDS
        ids = table.live_ids()
        ids = ids[ids < table.num_tokens - 1]
        return ids[self.are_forgotten(name, ids, config)]

    def are_forgotten(
        self, request_id: str, ids: Ints, config: VTokenConfig | None = None
    ) -> Bools:
        """Which of the tokens `ids` [k] a client named, besides protected ones [k]."""
        if request_id not in self.forgotten:
            return np.zeros(len(ids), dtype=np.bool_)
        named = covered(self.forgotten_pairs(request_id), ids)
        forgotten: Bools = named & ~self.protection(request_id, config).covers(ids)
        return forgotten

    def are_forgetting(self, rows: Ints) -> Bools:
        """Which of `rows` [k] have forgotten spans."""
        if not self.forgotten:
            return np.zeros(len(rows), dtype=np.bool_)
        names = self.tables.names
        return np.array([names[row] in self.forgotten for row in rows.tolist()], dtype=np.bool_)

    # ------------------------------------------------------------ questions

    def sessions(self) -> tuple[int, int]:
        """How many sessions hold blocks, and how many blocks they hold."""
        held = [table for table in self.tables if self.own_rules(table.request_id).session]
        return len(held), len({block for table in held for block in table.blocks})

    def left_of_prompts(self, rows: Ints) -> Ints:
        """The tokens that requests `rows` [k] compute before they decode [k], negative after it."""
        left: Ints = self.due.prefill_end[rows] - self.tables.columns.num_tokens[rows]
        return left

    def expected_left(self, rows: Ints) -> Ints:
        """The tokens that requests `rows` [k] are expected to compute until their ends [k]: what
        outputs of the newest requests suggest, and their `max_tokens` at most.
        """
        due, num_tokens = self.due, self.tables.columns.num_tokens[rows]
        expected = self.output_lengths.expected_left(num_tokens - due.num_prompt[rows])
        left: Ints = np.minimum(expected, due.max_tokens[rows] - num_tokens)
        return np.maximum(0, left)

    def giving_rows(self) -> Ints:
        """The rows that may give tokens under pressure, now or later in their lives."""
        return self.due.giving(self.tables.columns)

    def in_flight_step(self, request_id: str) -> int:
        """The step of the request's relocation that is not reported yet; 0 if there is none."""
        row = self.tables.rows.get(request_id)
        return 0 if row is None else int(self.due.in_flight[row])
