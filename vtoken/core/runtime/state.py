"""The state that the runtime's parts share: tables, requests, configuration, counters and events.

Independent of the engine; makes no decisions. Every invariant violation is reported here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vtoken.base.arrays import Bools, Ints, runs_of
from vtoken.base.errors import InvariantViolation
from vtoken.core.config.calibration import CalibrationProfile
from vtoken.core.config.prompt_parts import Spans
from vtoken.core.config.protection import NOTHING, Protection
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.config.spans import covered, merged, pairs_of
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import DEFERRALS
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.canary import CanaryTally
from vtoken.core.runtime.draft import StepDraft
from vtoken.core.runtime.due import DueColumns
from vtoken.core.runtime.events import EventLog
from vtoken.core.runtime.given import FinishedLog, GivenTally
from vtoken.core.runtime.latency import LatencyMeter
from vtoken.core.runtime.requests import Arrival, RequestState
from vtoken.core.runtime.wasted_moves import LastMoves
from vtoken.core.tables.token_table import TokenTable
from vtoken.core.tables.token_tables import TokenTables
from vtoken.policies import Policy
from vtoken.policies.shadow import ShadowTally
from vtoken.wire import Counters, Geometry, ReclamationCounters, RequestDetail


class RuntimeState:
    """The state of one block pool at engine step `step`.

    Every part may read all of it; only methods of this class assign its fields. `counters`,
    `events`, `latency`, `shadow`, `canary`, `draft`, `due` and each `RequestState` are separate
    objects with documented writers. `report_lag_steps`: how many steps the worker may be behind
    while the next one is planned. `max_drafts`: the most drafts of a request in a step, beside its
    newest token. `calibration`: the layers and heads of this model's signals, if measured.
    `config`, numbered `revision`, takes effect in the next step.
    """

    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        config: VTokenConfig,
        *,
        strict: bool,
        report_lag_steps: int,
        max_drafts: int,
        calibration: CalibrationProfile | None,
    ) -> None:
        self.geometry = geometry
        self.calibration = calibration
        self.store = store
        self.strict = strict
        self.report_lag_steps = report_lag_steps
        self.max_drafts = max_drafts
        self.step = 0
        self.config = config
        self.revision = 1
        self._effective: tuple[VTokenConfig, int] | None = None  # of the newest step
        self.tables = TokenTables(geometry.num_blocks, geometry.block_size)
        self.due = DueColumns()
        self._due_under: VTokenConfig | None = None  # the configuration that `due` was filled from
        self.draft = StepDraft()  # of the step being planned
        self.requests: dict[str, RequestState] = {}  # requests with a table
        self.last_moves: dict[str, LastMoves] = {}  # of those that were relocated
        self.request_rules: dict[str, RequestRules] = {}  # of announced requests
        self.arrivals: dict[str, Arrival] = {}  # of announced requests, without the canary's
        self.own_policies: dict[str, Policy] = {}  # of requests with their own policy
        # Spans of tokens that die first, of announced requests that have such; a preempted one too.
        self.forgotten: dict[str, Spans] = {}
        self.idle: frozenset[str] = frozenset()  # sessions that wait for their clients
        self.num_forgets = 0  # changes of `forgotten` besides arrivals and ends
        self.suspended: list[Policy] = []  # failed policies, which evict nothing more
        # Blocks that the first waiting request lacked in the last step, withheld ones included.
        self.wanted_blocks = 0
        self.is_short_soon = False  # requests under `pressure` keep their signals
        self.num_reports = 0  # steps that ended
        self.shadow = ShadowTally()
        self.canary = CanaryTally()
        self.counters = Counters(
            reclamation=ReclamationCounters(deferrals=dict.fromkeys(DEFERRALS, 0))
        )
        self.preempted: dict[str, int] = {}  # how often, of announced requests
        self.events = EventLog()
        self.latency = LatencyMeter()
        self.given = GivenTally()
        self.finished = FinishedLog()

    # ------------------------------------------------------------ tables and requests

    def admit(self, request: RequestState) -> None:
        """Create the table and columns of a request that gets its first blocks in this step."""
        table = self.tables.add(request.request_id)
        self.requests[request.request_id] = request
        arrival = self.arrivals.get(request.request_id)
        priority = 0 if arrival is None else arrival.priority
        self.due.admit(table.row, request.prefill_end, priority)
        self._set_rules(request.request_id, table.row)

    def _set_rules(self, request_id: str, row: int) -> None:
        self.due.set_rules(row, self.rules(request_id), self.protection(request_id))
        self._report_missing_words(request_id)

    def release(self, request_id: str) -> None:
        """Remove a request that releases its blocks, also from the step being planned."""
        row = self.tables.rows[request_id]
        self.draft.drop(row)
        self.due.release(row)
        self.last_moves.pop(request_id, None)
        self.tables.release(request_id)
        del self.requests[request_id]

    def begin_evicting(self, table: TokenTable) -> None:
        """Prepare `table` for its first eviction: its shared or hashed blocks become read-only.

        Blocks that it takes later are neither shared nor hashed.
        """
        if not table.virtual:
            table.protect(b for b in table.blocks if not self.store.is_writable(b))

    def rebound(self, table: TokenTable) -> None:
        """Pass a rewritten block table to the block store and the worker."""
        blocks = table.block_ids()
        self.draft.blocks[table.row] = blocks
        self.store.rebind(table.request_id, blocks.tolist())

    def drop_blocks(self, table: TokenTable, leaves: Bools) -> list[int]:
        """Drop the blocks without live tokens where `leaves` [num_blocks] is set; return them.

        The caller gives them back to the store after all plans of the pass.
        """
        dropped = self.tables.drop_blocks(table, leaves)
        self.draft.blocks[table.row] = table.block_ids()
        self.store.remove(table.request_id, runs_of(leaves))
        return dropped

    # ------------------------------------------------------------ the step being planned

    def begin_step(self) -> None:
        """Begin a step, which runs entirely with the current configuration."""
        self.step += 1
        self._effective = self.config, self.revision
        self.shadow.set_policy(self.config.shadow)
        if self._due_under is not self.config:
            self._due_under = self.config
            for request_id, row in self.tables.rows.items():
                self._set_rules(request_id, row)

    def take_draft(self) -> StepDraft:
        """Take the draft of the planned step; the next step starts with an empty one."""
        draft = self.draft
        if not draft.is_empty:
            self.draft = StepDraft()
        return draft

    def begin_allocation(self) -> None:
        """Reset `wanted_blocks` before the engine allocates."""
        self.wanted_blocks = 0

    def want_blocks(self, num_blocks: int) -> None:
        """Record that a waiting request lacks `num_blocks`, withheld ones included."""
        self.wanted_blocks = max(self.wanted_blocks, num_blocks)

    # ------------------------------------------------------------ configuration

    def install(self, config: VTokenConfig, revision: int | None = None) -> None:
        """Install a new revision, in force from the next step on; by default the next number."""
        self.config = config
        self.revision = self.revision + 1 if revision is None else revision

    @property
    def effective(self) -> tuple[VTokenConfig, int]:
        """The configuration of the newest step, and its revision.

        While no request holds a block, a new configuration is in force immediately.
        """
        if self._effective is None or not self.requests:
            return self.config, self.revision
        return self._effective

    def announce(
        self, request_id: str, rules: RequestRules, arrival: Arrival | None = None
    ) -> None:
        """Set the rules of a request that has arrived; `arrival`: what it waits for."""
        self.request_rules[request_id] = rules
        if arrival is not None:
            self.arrivals[request_id] = arrival
        if rules.policy is not None:
            self.own_policies[request_id] = rules.policy
        if rules.forget:
            self.forgotten[request_id] = rules.forget

    def forget(self, request_id: str) -> None:
        """Remove the rules of a request that has ended."""
        self.request_rules.pop(request_id, None)
        self.arrivals.pop(request_id, None)
        self.own_policies.pop(request_id, None)
        self.forgotten.pop(request_id, None)

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
        ids = ids[covered(self.forgotten_pairs(name), ids) & (ids < table.num_tokens - 1)]
        forgotten: Ints = ids[~self.protection(name, config).covers(ids)]
        return forgotten

    def are_forgetting(self, rows: Ints) -> Bools:
        """Which of `rows` [k] have forgotten spans."""
        if not self.forgotten:
            return np.zeros(len(rows), dtype=np.bool_)
        names = self.tables.names
        return np.array([names[row] in self.forgotten for row in rows.tolist()], dtype=np.bool_)

    def rules(self, request_id: str, config: VTokenConfig | None = None) -> VTokenConfig:
        """The configuration for one request; `config`: under that one instead."""
        config = self.config if config is None else config
        own = self.request_rules.get(request_id)
        return config if own is None else own.under(config)

    def protection(self, request_id: str, config: VTokenConfig | None = None) -> Protection:
        """The protected tokens of a request; `config`: under that one instead."""
        own = self.request_rules.get(request_id)
        return NOTHING if own is None else own.protection(self.config if config is None else config)

    def describe_rules(self, detail: RequestDetail) -> None:
        """Fill in when a request evicts, which of its tokens are protected and forgotten, and a
        budget of its own that its policy and its protected tokens exceed.
        """
        own, protection = self.request_rules.get(detail.id), self.protection(detail.id)
        detail.evict_during = self.rules(detail.id).evict_during
        detail.protected, detail.protection_cut = protection.spans(), list(protection.cut)
        detail.forgotten = [*self.forgotten.get(detail.id, ())]
        asked = None if own is None else own.budget_tokens
        if asked is not None and asked < detail.budget_tokens:
            detail.asked_budget_tokens = asked

    def is_session(self, request_id: str) -> bool:
        """Whether the request is a streaming-input session."""
        own = self.request_rules.get(request_id)
        return own is not None and own.session

    def sessions(self) -> tuple[int, int]:
        """How many sessions hold blocks, and how many blocks they hold."""
        held = [table for table in self.tables if self.is_session(table.request_id)]
        return len(held), len({block for table in held for block in table.blocks})

    def set_idle(self, request_ids: Iterable[str]) -> None:
        """Record which sessions wait for their clients now."""
        self.idle = frozenset(request_ids)

    def asks_for_report(self, request_id: str) -> bool:
        """Whether the request's answer is to say what it kept."""
        own = self.request_rules.get(request_id)
        return own is not None and own.report

    def is_embedded(self, request_id: str) -> bool:
        """Whether the request's prompt came as embeddings."""
        own = self.request_rules.get(request_id)
        return own is not None and own.prompt.is_embedded

    def _report_missing_words(self, request_id: str) -> None:
        """Add an event if a request evicts nothing because its policy needs words."""
        own = self.request_rules.get(request_id)
        policy = None if own is None else own.lacks_words(self.config)
        if policy is not None:
            self.events.add(
                self.step,
                "eviction",
                f"{policy.name} evicts nothing of {request_id}: its prompt came as embeddings, "
                "which have no words",
                {"requests": 1, "tokens": 0, "policy": policy.name},
            )

    def left_of_prompts(self, rows: Ints) -> Ints:
        """The tokens that requests `rows` [k] compute before they decode [k], negative after it."""
        left: Ints = self.due.prefill_end[rows] - self.tables.columns.num_tokens[rows]
        return left

    def needed_blocks(self, num_live: Ints) -> Ints:
        """Blocks [k] for `num_live` [k] tokens and those of the next step: one and its drafts."""
        needed: Ints = (num_live + self.max_drafts) // self.geometry.block_size + 1
        return needed

    def in_flight_step(self, request_id: str) -> int:
        """The step of the request's relocation that is not reported yet; 0 if there is none."""
        row = self.tables.rows.get(request_id)
        return 0 if row is None else int(self.due.in_flight[row])

    def giving_rows(self) -> Ints:
        """The rows that may give tokens under pressure, now or later in their lives."""
        return self.due.giving(self.tables.columns)

    @property
    def evicts_by_length(self) -> bool:
        """Whether any request may become due by its length alone, or the rules have changed."""
        if self._due_under is not self.config:
            return True
        return self.due.any_by_length

    def set_near(self, is_near: bool) -> None:
        """Record whether a shortage of blocks is near in the step being planned."""
        self.is_short_soon = is_near

    @property
    def may_evict(self) -> bool:
        """Whether the configuration, or a request's own policy, may evict anything."""
        return self.config.evicts or bool(self.own_policies)

    def suspend(self, policy: Policy) -> None:
        """Mark `policy` as failed; it evicts nothing more."""
        self.suspended.append(policy)

    # ------------------------------------------------------------ violations

    def violated(self, violation: InvariantViolation) -> None:
        """Count and report a broken invariant; in strict mode, raise it before the step ends."""
        self.counters.invariants.violations += 1
        self.events.add(
            self.step,
            "violation",
            str(violation),
            {"invariant": violation.invariant, "detail": violation.detail},
        )
        if self.strict:
            raise violation
