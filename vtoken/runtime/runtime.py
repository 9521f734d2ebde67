"""The runtime: token tables, policy, planner and recycling composed into one step protocol.

Knows no engine: whoever owns the blocks implements `BlockStore` and calls, once a step,

    begin_step(ready, …)    before allocation: evict, give all-dead blocks back, relocate
    required_extent(id, n)  during it: how many places the request needs for n new tokens
    commit_step(grown)      after it: register the new tokens, return the worker's plan
    pass_step()             instead, where the runtime is `resting` and the step admitted nobody
    finish_step(report)     what the worker reports of a step
    sampled(ids, n)         which requests were given a token by it

`release(id)` whenever a request lets go of its blocks, `announce` when a request arrives and
`forget` when it is over for good.

While nothing may evict and every table is positional, tables say only what the engine's own books
say too. Steps then pass without them, and without a plan; `tables` are caught up when asked for,
from those books. Requests enter and leave their tables at once, never late. Invariants:
1. the step's victims are invisible from that step's attention on, whatever reclamation does
2. a block given back in begin_step is in nobody's table; none becomes a destination in the same
   pass (they are collected and returned after all plans)
3. destinations and recycled places lie in blocks that are private and unhashed
4. a request has at most one relocation that is not reported (I4)
5. what `release` sees between begin_step and commit_step leaves the step's plan with the request
6. whoever asks for `tables` gets them as if every step had been committed
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain

from vtoken.config.request_rules import RequestRules
from vtoken.config.values import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.protocol.step import StepPlan, WorkerReport
from vtoken.runtime.admission import Admission
from vtoken.runtime.eviction import Evictor
from vtoken.runtime.growth import Grower, GrownRequest
from vtoken.runtime.policy_runner import Judge
from vtoken.runtime.relocation import Relocator
from vtoken.runtime.scoring import Scoring
from vtoken.runtime.state import BlockStore, Ledger
from vtoken.wire import MAX_TOKENS, Geometry

__all__ = ["BlockStore", "GrownRequest", "Runtime"]


class Runtime(Ledger):
    """Token-level virtualization of one block pool."""

    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        config: VTokenConfig,
        *,
        strict: bool = True,
        check_every_step: bool = False,
        report_lag_steps: int = 0,
        max_chunk_tokens: int = MAX_TOKENS,
        lends_blocks: bool = True,
    ) -> None:
        super().__init__(geometry, store, config, strict=strict, report_lag_steps=report_lag_steps)
        self.check_every_step = check_every_step
        self.resting = False  # nothing can be due in the newest step
        self.lends_blocks = lends_blocks
        self.grower = Grower(self)
        self.scoring = Scoring(self)
        self.judge = Judge(self, self.scoring)
        self.evictor = Evictor(self, self.judge)
        self.relocator = Relocator(self)
        self.operations = self.relocator.operations
        self.admission = Admission(self, max_chunk_tokens)

    def announce(
        self,
        request_id: str,
        rules: RequestRules | None,
        *,
        num_prompt_tokens: int = 0,
        max_tokens: int = 0,
    ) -> None:
        """A request has arrived; `rules` are its own, None when the configuration rules it.

        `max_tokens`: its prompt and output at most.
        """
        if rules is not None:
            self.own_rules[request_id] = rules
        self.admission.announce(request_id, num_prompt_tokens, max_tokens)
        self.latency.arrived(request_id, time.monotonic())

    def forget(self, request_id: str) -> None:
        """The request is over for good, scheduled ever or not; its blocks have been released."""
        self.own_rules.pop(request_id, None)
        self.counters.preempted_per_request.pop(request_id, None)
        self.admission.forget(request_id)
        self.latency.forget(request_id)

    def begin_step(self, ready: Iterable[str], prefilling: Sequence[tuple[str, int]] = ()) -> None:
        """Decide what dies and what moves before this step's allocation.

        `ready`: requests whose prompt is computed and that will append one token next.
        `prefilling`: those in the middle of their prompt, each with its next chunk's most tokens.
        """
        self.step += 1
        self.take_config()
        if self.idle and not self.operations.pending and not self.scoring.active:
            if not self.resting:
                self.resting = True
                self.relocator.forget_step()
            self.wanted_blocks = 0
            return  # nothing is dead: no holes, nothing to move, nothing to give back
        self.resting = False
        self.catch_up()
        freed: list[int] = []
        self.evictor.let_go_of_kept(freed)
        due = chain(ready, (request_id for request_id, _ in prefilling))
        died = self.may_evict and self.evictor.evict_due(due, freed)
        missing = self._missing_blocks(prefilling, freed) if prefilling else 0
        self.relocator.plan_step(freed, new_holes=died, missing_blocks=missing)
        self.wanted_blocks = 0
        if freed:
            freed.reverse()  # the first to be returned is the first to leave the prefix cache
            self.store.give_back(freed)
        if self.grower.pick_holes():
            self.relocator.deferrals.note_held_back()

    def required_extent(self, request_id: str, num_new: int) -> int | None:
        """Places that must exist for `num_new` more tokens; None when the layout is positional."""
        return None if self.resting else self.grower.required_extent(request_id, num_new)

    def commit_step(self, grown: Iterable[GrownRequest]) -> StepPlan:
        """Register the tokens of the scheduled requests; the plan that the worker must execute."""
        self.catch_up()
        plan = StepPlan(self.step)
        reading = self.scoring.has_readers()
        if reading:
            grown = list(grown)
            lengths = [self.num_tokens(request.request_id) for request in grown]
        self.grower.enter(grown)
        if reading:
            ids = (request.request_id for request in grown)
            self.scoring.ask(plan, zip(ids, lengths, strict=True))
        plan.requests, self.parts = self.parts, {}
        known = self.tables.get
        for request_id, part in plan.requests.items():
            if part.num_live:
                continue  # told when its token was entered
            table = known(request_id)
            assert table is not None  # what lets go of its blocks takes its part along
            part.num_live = table.num_live
            part.dense = table.extent == table.num_live
        if self.lends_blocks:  # where holes are packed before attention reads
            self.grower.lend_scratch(plan)
        self.relocator.hand_over(plan)
        self._count_commit()
        return plan

    def pass_step(self) -> None:
        """The step changes nothing that the engine's own books do not say, and needs no plan.

        Instead of `commit_step`, where the runtime is `resting` and no request without a table was
        scheduled.
        """
        self._behind = True
        self._count_commit()

    def _count_commit(self) -> None:
        self.counters.commits_checked += 1
        if self.check_every_step:
            try:
                self.check()
            except InvariantViolation as violation:
                self.violated(violation)

    def num_tokens(self, request_id: str) -> int:
        """Tokens in the request's table, dead ones included; 0 before its first step."""
        table = self.tables.get(request_id)
        return 0 if table is None else table.num_tokens

    def _missing_blocks(self, prefilling: Sequence[tuple[str, int]], freed: list[int]) -> int:
        """Blocks that the next chunks take beyond those that are free, `freed` included."""
        needed = 0
        for request_id, num_new in prefilling:
            table = self.tables.get(request_id)
            if table is not None and table.virtual:
                state = self.states[request_id]
                places = table.append_start(state.readonly) + num_new
                needed += max(0, -(-places // self.geometry.block_size) - len(table.blocks))
        holders = self.tables.pool.holders
        free = self.store.num_free_blocks() + len({b for b in freed if holders[b] == 0})
        return needed - free

    def finish_step(self, report: WorkerReport | None, step: int) -> None:
        """The worker is done with `step`; `report` is None when it had nothing to say."""
        # Steps run in order: what is still awaited of an earlier one is lost.
        for earlier in self.relocator.steps_in_flight(before=step):
            self.relocator.finish_step(earlier, 0, self._check_copies(None, earlier))
        fault = self._check_copies(report, step)
        copy_us = report.copy_us if report is not None else 0
        self.counters.copy_us += copy_us
        self.relocator.finish_step(step, copy_us, fault)
        if report is None:
            return
        self.counters.verified_relocations += report.verified_relocations
        self.counters.verify_us += report.verify_us
        if report.violation is not None:
            self.violated(InvariantViolation("I1", report.violation))
        if report.disagreement is not None:
            self.violated(InvariantViolation("ranks", report.disagreement))
        self.scoring.receive(report)

    def sampled(self, request_ids: list[str], num_tokens: int, now: float) -> None:
        """A step gave `num_tokens` tokens to `request_ids` in all; `now`: monotonic seconds."""
        self.counters.generated_tokens += num_tokens
        self.latency.tokens(request_ids, now)

    def _check_copies(self, report: WorkerReport | None, step: int) -> str | None:
        """The report is of this step, and says that every copy of its plan was made (I3).

        What is wrong with it, None when nothing is.
        """
        planned = self.relocator.num_planned_copies(step)
        told, done = (step, 0) if report is None else (report.step, report.moved_tokens)
        if told == step and done == planned:
            return None
        says = f"the report of {told} says {done}" if report is not None else "none was reported"
        wrong = f"step {step} copies {planned} tokens, {says}"
        self.violated(InvariantViolation("I3", wrong))
        return wrong

    def release(self, request_id: str, *, preempted: bool = False) -> None:
        """The request lets go of its blocks: finished, aborted or preempted."""
        if request_id not in self.states:
            return
        # Of a request that is over, the table need not know the last steps.
        table = (self.tables if preempted else self._tables)[request_id]
        num_dead, num_tokens = table.num_dead, table.num_tokens
        self.relocator.drop(request_id)
        self._tables.release(request_id)
        del self.states[request_id]
        if not self.all_positional:
            self.all_positional = not any(table.virtual for table in self._tables)
        if not self.states:
            self.relocator.settle()
        self.parts.pop(request_id, None)
        per_request = self.counters.preempted_per_request
        if preempted:
            self.admission.resumes(request_id, num_tokens + 1)
            self.counters.preemptions += 1
            per_request[request_id] = per_request.get(request_id, 0) + 1
            self.events.add(
                self.step,
                "preemption",
                f"{request_id} preempted; {num_dead} dead tokens will be recomputed and seen again",
                {"request_id": request_id, "dead_tokens_restored": num_dead},
            )
        else:
            self.counters.finished_requests += 1
            self.forget(request_id)

    def check(self) -> None:
        """All invariants, recomputed from nothing; raises InvariantViolation."""
        self.tables.check()
        if self.all_positional and any(table.virtual for table in self.tables):
            raise InvariantViolation("I4", "a request has evicted something, and none is known to")
        if set(self.states) != {table.request_id for table in self.tables}:
            raise InvariantViolation("I4", "a request has a table but no state, or the reverse")
        if differences := self.store.differences(self.tables):
            raise InvariantViolation("I4", "; ".join(differences[:3]))
