"""What the parts of the runtime share: tables, requests, configuration, counters and events.

Knows no engine and takes no decision. Everything that protects KV data is reported here.
"""

from __future__ import annotations

from vtoken.config.calibration import CalibrationProfile
from vtoken.config.protection import NOTHING, Protection
from vtoken.config.request_rules import RequestRules
from vtoken.config.values import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.policies import Policy
from vtoken.policies.shadow import ShadowTally
from vtoken.runtime.block_store import BlockStore
from vtoken.runtime.canary import CanaryTally
from vtoken.runtime.draft import StepDraft
from vtoken.runtime.due import DueColumns
from vtoken.runtime.events import EventLog
from vtoken.runtime.latency import LatencyMeter
from vtoken.runtime.requests import Counters, RequestState
from vtoken.tables.token_table import TokenTable
from vtoken.tables.token_tables import TokenTables
from vtoken.wire import Geometry


class RuntimeState:
    """The state of one block pool at engine step `step`.

    Every part may read all of it. Only the methods of this class assign its fields. `counters`,
    `events`, `latency`, `shadow`, `canary`, `draft`, `due` and each `RequestState` are objects of
    their own, whose docstrings say who changes them. `report_lag_steps`: how many steps may be with
    the worker while the next one is planned. `calibration`: where this model's signals are taken
    from, if it was measured. `config`, of number `revision`, is what the next step takes.
    """

    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        config: VTokenConfig,
        *,
        strict: bool,
        report_lag_steps: int = 0,
        calibration: CalibrationProfile | None = None,
    ) -> None:
        self.geometry = geometry
        self.calibration = calibration
        self.store = store
        self.strict = strict
        self.report_lag_steps = report_lag_steps
        self.step = 0
        self.config = config
        self.revision = 1
        self._taken: tuple[VTokenConfig, int] | None = None  # by the newest step
        self.tables = TokenTables(geometry.num_blocks, geometry.block_size)
        self.due = DueColumns()
        self._due_under: VTokenConfig | None = None  # the configuration that `due` was filled by
        self.draft = StepDraft()  # of the step being planned
        self.requests: dict[str, RequestState] = {}  # all that have a table
        self.request_rules: dict[str, RequestRules] = {}  # of requests that were announced
        self.own_policies: dict[str, Policy] = {}  # of those that brought their own
        self.suspended: list[Policy] = []  # those that have failed: nothing dies by them any more
        # What the request that waits first lacked in the last step, and what was kept from it.
        self.wanted_blocks = 0
        self.shadow = ShadowTally()
        self.canary = CanaryTally()
        self.counters = Counters()
        self.events = EventLog()
        self.latency = LatencyMeter()

    # ------------------------------------------------------------ tables and requests

    def admit(self, request: RequestState) -> None:
        """The request gets its first blocks in this step."""
        table = self.tables.add(request.request_id)
        self.requests[request.request_id] = request
        self.due.admit(
            table.row,
            self.rules(request.request_id),
            request.prefill_end,
            self.protection(request.request_id),
        )
        self._note_words(request.request_id)

    def release(self, request_id: str) -> None:
        """The request lets go of its blocks, and of its part of the step being planned."""
        self.draft.drop(self.tables.rows[request_id])
        self.tables.release(request_id)
        del self.requests[request_id]

    def begin_evicting(self, table: TokenTable) -> None:
        """Tokens of `table` are about to die. With the first ones its layout leaves the identity,
        and what it holds shared or hashed now is read-only; what joins later is neither.
        """
        if not table.virtual:
            table.protect(b for b in table.blocks if not self.store.is_writable(b))

    def rebound(self, table: TokenTable) -> None:
        """The table's block list was rewritten: tell the owner of the blocks and the worker."""
        blocks = table.blocks
        self.draft.blocks[table.row] = blocks
        self.store.rebind(table.request_id, blocks)

    # ------------------------------------------------------------ the step being planned

    def begin_step(self) -> None:
        """A step begins: it runs as a whole with the configuration as it stands."""
        self.step += 1
        self._taken = self.config, self.revision
        self.shadow.follow(self.config.shadow)
        if self._due_under is not self.config:
            self._due_under = self.config
            for request_id, row in self.tables.rows.items():
                self.due.follow(row, self.rules(request_id), self.protection(request_id))
                self._note_words(request_id)

    def take_draft(self) -> StepDraft:
        """The draft of the step that has been planned; the next one starts with an empty one."""
        draft = self.draft
        if not draft.is_empty:
            self.draft = StepDraft()
        return draft

    def begin_allocation(self) -> None:
        """The engine allocates from now on; nobody is known to wait for blocks yet."""
        self.wanted_blocks = 0

    def want_blocks(self, num_blocks: int) -> None:
        """A request waits, and lacks `num_blocks`, those that are kept from it included."""
        self.wanted_blocks = max(self.wanted_blocks, num_blocks)

    # ------------------------------------------------------------ configuration

    def install(self, config: VTokenConfig) -> None:
        """A new revision, in force from the next step on."""
        self.config = config
        self.revision += 1

    @property
    def effective(self) -> tuple[VTokenConfig, int]:
        """What the newest step runs with, and its revision.

        While no request holds a block nothing runs, and the configuration is in force at once.
        """
        if self._taken is None or not self.requests:
            return self.config, self.revision
        return self._taken

    def announce(self, request_id: str, rules: RequestRules) -> None:
        """A request has arrived that these rules hold for."""
        self.request_rules[request_id] = rules
        if rules.policy is not None:
            self.own_policies[request_id] = rules.policy

    def forget(self, request_id: str) -> None:
        """The request is over for good."""
        self.request_rules.pop(request_id, None)
        self.own_policies.pop(request_id, None)

    def rules(self, request_id: str, config: VTokenConfig | None = None) -> VTokenConfig:
        """The configuration as it holds for one request; `config`: under that one instead."""
        config = self.config if config is None else config
        own = self.request_rules.get(request_id)
        return config if own is None else own.under(config)

    def protection(self, request_id: str, config: VTokenConfig | None = None) -> Protection:
        """What of a request is never evicted; `config`: under that one instead."""
        own = self.request_rules.get(request_id)
        return NOTHING if own is None else own.protection(self.config if config is None else config)

    def is_embedded(self, request_id: str) -> bool:
        """Whether the request's prompt came as embeddings."""
        own = self.request_rules.get(request_id)
        return own is not None and own.prompt.is_embedded

    def _note_words(self, request_id: str) -> None:
        """An event where a request evicts nothing since its policy looks at words."""
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

    @property
    def may_evict(self) -> bool:
        """Whether the configuration, or a request's own policy, may evict anything."""
        return self.config.evicts or bool(self.own_policies)

    def suspend(self, policy: Policy) -> None:
        """`policy` has failed: nothing dies by it any more."""
        self.suspended.append(policy)

    # ------------------------------------------------------------ violations

    def violated(self, violation: InvariantViolation) -> None:
        """An invariant broke: count it, report it, and in strict mode stop before the step ends."""
        self.counters.violations += 1
        self.events.add(
            self.step,
            "violation",
            str(violation),
            {"invariant": violation.invariant, "detail": violation.detail},
        )
        if self.strict:
            raise violation
