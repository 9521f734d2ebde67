"""The runtime: token tables, policy, planner and recycling composed into one step protocol.

Independent of the engine. The owner of the blocks implements `BlockStore` and calls, in every step,

    begin_step(ready, …)    before allocation: evict, return all-dead blocks, relocate, restore
    required_extent(id, n)  during allocation: the places that n tokens of a request require
    commit_step(scheduled)  after allocation: append the new tokens, return the worker's plan
    finish_step(report)     process the worker's report
    truncate(rejected)      take back the drafts that were rejected; `check_lengths` compares
    sampled(ids, n)         record the requests that got a token

It also calls `announce` when a request arrives, `release` when a request releases its blocks and
`discard` when a request has ended.

A step costs a few kernel calls for all requests together. While no request has evicted anything and
no policy reads a signal, the worker does not need the plan (`concerns_worker`). Invariants:
1. attention does not read a step's victims from that step on, regardless of reclamation
2. a block returned in begin_step is in no table and becomes no destination in the same pass (blocks
   are collected and returned after all plans)
3. destinations and recycled places are in private, unhashed blocks
4. a request has at most one relocation in flight (I4)
5. a request released between begin_step and commit_step is removed from the step's plan
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from vtoken.base.errors import InvariantViolation
from vtoken.base.request_ids import short_id
from vtoken.core.config.request_rules import Prompt, RequestRules
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import StepPlan, WorkerReport
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.admission import Admission
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.canary import CanaryTally
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.demand import DemandBook
from vtoken.core.runtime.drafts import DraftTally
from vtoken.core.runtime.eviction import Evicted, Evictor
from vtoken.core.runtime.growth import Scheduled, TokenAppender
from vtoken.core.runtime.latency import LatencyMeter
from vtoken.core.runtime.losses import FinishedLog, Losses
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.parking import Parking
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.ranking import Ranking
from vtoken.core.runtime.relocation.operations import Operations, record_operation
from vtoken.core.runtime.relocation.relocator import Relocator
from vtoken.core.runtime.relocation.round_planner import RoundPlanner
from vtoken.core.runtime.request_rows import describe_rules, request_row
from vtoken.core.runtime.requests import Announced, Requests
from vtoken.core.runtime.restoring import Restorer
from vtoken.core.runtime.shortage import NO_SHORTAGE, Shortage, ShortageMonitor
from vtoken.core.runtime.swapping import OBSTACLES, Swapper
from vtoken.core.tables.token_table import TokenTable
from vtoken.policies import Policy, make_policy
from vtoken.policies.shadow import ShadowTally
from vtoken.policies.tokenizer_info import Vocabulary
from vtoken.wire import RequestDetail


class Runtime:
    """Token-level virtualization of one block pool.

    Three parts own state that others read: `requests`, the step being planned `current`, and the
    configuration `active`. `vocabulary`: the engine's tokens, if it has a tokenizer. `num_sampled`:
    how many tokens a request that holds blocks has given its client.
    """

    def __init__(
        self,
        shape: EngineShape,
        store: BlockStore,
        config: VTokenConfig,
        *,
        strict: bool = True,
        check_every_step: bool = False,
        vocabulary: Vocabulary | None = None,
        other_groups: OtherGroups = (),
        num_sampled: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self.check_every_step = check_every_step
        self.num_sampled = num_sampled
        self.other_groups = other_groups
        self.store = store
        self.shape = shape
        self.geometry = shape.geometry
        self.active = active = ActiveConfig(config)
        self.current = current = CurrentStep(strict=strict)
        self.requests = requests = Requests(shape.geometry, active, self._note_missing_words)
        self.tables = requests.tables  # after the newest step
        self.counters = current.counters
        self.events = current.events
        self.latency = LatencyMeter()
        self.canary = CanaryTally()
        self.shadow = ShadowTally()
        self.drafts = DraftTally(active, current.counters.serving)
        self.finished = FinishedLog()
        self.losses = Losses(requests, current)
        self.prices = Prices()
        self.operations = Operations(partial(record_operation, current))
        self.parking = Parking(shape.geometry, requests, active, current, self.prices)
        self.swapper = Swapper(
            shape, store, requests, current, self.prices, self.parking, other_groups
        )
        self.appender = TokenAppender(shape, store, requests, active, current, self.swapper)
        self.required_extent = self.appender.required_extent
        self.ranking = Ranking(shape, requests, active, current, self.shadow, vocabulary)
        self.demand = DemandBook(shape, store, requests, active, other_groups)
        self.admission = Admission(shape, store, requests, active, current, self.demand)
        self.shortages = ShortageMonitor(
            shape,
            store,
            requests,
            active,
            current,
            self.demand,
            self.admission,
            self.prices,
            self.parking,
            other_groups,
        )
        self.restorer = Restorer(
            shape,
            store,
            requests,
            active,
            current,
            self.parking,
            self.prices,
            self.admission,
            self.shortages,
        )
        self.evictor = Evictor(
            store, requests, active, current, self.ranking, self.losses, self.parking
        )
        self.round_planner = RoundPlanner(shape, store, requests, self.prices)
        self.relocator = Relocator(
            shape,
            store,
            requests,
            active,
            current,
            self.round_planner,
            self.prices,
            self.operations,
        )

    # ------------------------------------------------------------ reading

    @property
    def config(self) -> VTokenConfig:
        """The configuration of the next step."""
        return self.active.config

    @property
    def revision(self) -> int:
        """The number of that configuration."""
        return self.active.revision

    @property
    def effective(self) -> tuple[VTokenConfig, int]:
        """The configuration of the newest step, and its revision.

        While no request holds a block, a new configuration is in force immediately.
        """
        if self.active.of_step is None or not self.requests.held:
            return self.active.config, self.active.revision
        return self.active.of_step

    @property
    def step(self) -> int:
        return self.current.number

    @property
    def version(self) -> tuple[int, ...]:
        """The state that plans depend on, besides the configuration.

        Equal versions: victims would be chosen and a round would be planned equally.
        """
        return (
            self.current.number,
            self.current.num_reports,
            self.requests.num_forgets,
            self.tables.num_changes,
            self.store.num_free_blocks(),
            self.relocator.num_in_flight_tokens,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing can be due in the coming step and no request with blocks has evicted."""
        requests = self.requests
        if self.tables.any_virtual:
            return False
        return not requests.may_evict or not (requests.evicts_by_length or self.shortages.is_near())

    def concerns_worker(self, plan: StepPlan) -> bool:
        """Whether the worker needs `plan`: a request has evicted or keeps signals.

        A worker without a plan drops its state of all requests, those that are not scheduled in
        this step included.
        """
        if plan.signals or plan.copies:
            return True
        return self.tables.any_virtual or self.ranking.keeps_signals

    # ------------------------------------------------------------ requests come and go

    def announce(
        self,
        request_id: str,
        rules: RequestRules | None,
        *,
        num_prompt_tokens: int = 0,
        max_tokens: int = 0,
        priority: int = 0,
        prompt: Prompt | None = None,
    ) -> None:
        """A request has arrived; `rules` are its own, None for those of the configuration.

        `max_tokens`: prompt and output at most; `priority`: vLLM's, lower is more important;
        `prompt`: further facts about the prompt.
        """
        prompt = Prompt(num_prompt_tokens) if prompt is None else prompt
        rules = replace(rules or RequestRules(), prompt=prompt)
        request = Announced(rules, num_prompt_tokens, max_tokens, priority)
        self.requests.announce(request_id, request)
        self.latency.arrived(request_id, time.monotonic())

    def announce_check(self, request_id: str) -> None:
        """A request of the quality canary arrives: it evicts nothing and is not counted."""
        self.canary.request_id = request_id
        rules = RequestRules(policy=make_policy("none", {}))
        self.requests.announce(request_id, Announced(rules, is_check=True))

    def release(self, request_id: str, *, preempted: bool = False, settled: bool = False) -> None:
        """The request releases its blocks: finished, aborted or preempted.

        `settled`: the engine knows which tokens of a preempted one are computed, and can let it go
        on from them; it does not while drafts are in flight, or if K and V are void.
        """
        requests = self.requests
        if request_id not in requests.held:
            return
        is_check = request_id == self.canary.request_id
        preempted = preempted and not is_check
        table = self.tables[request_id]
        num_sampled = 0 if is_check else self.num_sampled(request_id)
        if not preempted and not is_check:
            self._note_end(request_id, num_sampled)
            requests.output_lengths.add(num_sampled)
        if not preempted or not self._swap(table, settled=settled):
            self.parking.drop_request(table)
        self.relocator.drop(request_id)
        self.current.decisions.drop(table.row)
        requests.release(request_id)
        if not requests.held:
            self.relocator.settle()
        if preempted:
            self.counters.requests.preempted += 1
            self.counters.pressure.preemptions_above_floor += self.demand.givable_blocks() > 0
        else:
            self.counters.requests.finished += not is_check
            self.discard(request_id, num_sampled)

    def _swap(self, table: TokenTable, *, settled: bool) -> bool:
        """Park all of a preempted request if it is possible and cheaper than computing it again.

        Returns whether it is; adds the event of the preemption.
        """
        name, num_live, num_tokens = table.request_id, table.num_live, table.num_tokens
        why = ""
        if is_on := self.parking.is_on:
            why = self.swapper.obstacle(table, settled=settled)
        is_swapped = is_on and not why
        if is_swapped:
            self.swapper.park(table)
            text = f"its {num_live:,} tokens wait in host memory, and nothing is computed again"
        else:
            text = f"{num_tokens:,} tokens will be computed again, "
            text += f"{table.num_dead:,} of them evicted before"
        if why:
            refused = self.counters.parking.swaps_refused
            refused[why] = refused.get(why, 0) + 1
            text += f": {OBSTACLES[why]}"
        self.requests.preempted(name, 1 + (num_live if is_swapped else num_tokens))
        self.current.note(
            "preemption",
            f"{short_id(name)} preempted; {text}",
            {
                "request_id": name,
                "recomputed_tokens": 0 if is_swapped else num_tokens,
                "dead_tokens_restored": 0 if is_swapped else table.num_dead,
                "swapped_tokens": num_live if is_swapped else 0,
                "obstacle": why,
            },
        )
        return is_swapped

    def _note_end(self, request_id: str, num_sampled: int) -> None:
        """Record what a request that ends has kept."""
        table, request = self.tables[request_id], self.requests.held[request_id]
        ended = request_row(
            RequestDetail,
            self.requests,
            request_id,
            "finished",
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=num_sampled,
        )
        ended.live, ended.dead = table.num_live, table.num_dead
        ended.given_tokens, ended.ended_ts = request.given_tokens, time.time()
        ended.restored_tokens = table.num_restored
        describe_rules(self.requests, ended)
        self.finished.add(ended)

    def _note_missing_words(self, request_id: str, policy: Policy) -> None:
        self.current.note(
            "eviction",
            f"{policy.name} evicts nothing of {short_id(request_id)}: its prompt came as "
            "embeddings, which have no words",
            {"requests": 1, "tokens": 0, "policy": policy.name},
        )

    def discard(self, request_id: str, num_sampled: int = 0) -> None:
        """The request has ended, whether it was ever scheduled or not, and its client got
        `num_sampled` tokens; its blocks are released.
        """
        self.swapper.discard(request_id)
        self.requests.discard(request_id)
        self.admission.discard(request_id)
        self.latency.discard(request_id, num_sampled, time.monotonic())

    # ------------------------------------------------------------ the step

    def begin_step(
        self,
        ready: Iterable[str],
        prefilling: Sequence[tuple[str, int]] = (),
        drafting: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Evict, relocate and restore before this step's allocation.

        `ready`: requests whose prompt is computed and that append their newest token next; those
        `drafting` append drafts behind it, so many tokens in all. `prefilling`: requests in the
        middle of their prompt, with the maximum size of their next chunk.
        """
        self.current.number += 1
        self.current.is_planned = True
        self.active.begin_step()
        self.shadow.set_policy(self.config.shadow)
        self.latency.set_objectives(self.config.objectives)
        self.requests.begin_step()
        self.admission.begin_step()
        self.parking.begin_step()
        freed = self.evictor.drop_retained()
        self.relocator.forget_step()
        ready = list(ready)
        shortage, reclaimed = self._shortage(ready, prefilling, freed)
        freed += reclaimed
        died = False
        if self.requests.may_evict:
            died, dropped = self._evict(ready + [name for name, _ in prefilling], shortage)
            freed += dropped
        several = [*prefilling, *drafting]
        missing = self._missing_blocks(several, freed) if several else 0
        if shortage.now_blocks:
            missing = max(missing, shortage.now_blocks - self._num_free(freed))
        freed += self.relocator.plan_step(
            new_holes=died, missing_blocks=missing, short_blocks=shortage.blocks
        )
        self.restorer.restore(shortage.blocks)
        self.current.wanted_blocks = 0
        if freed:
            freed.reverse()  # the block freed first is the first to leave the prefix cache
            self.store.give_back(freed)
        if self.appender.choose_places():
            self.relocator.note_held_back()

    def _evict(self, names: list[str], shortage: Shortage) -> Evicted:
        """Evict what is due among the requests `names`, and what they give for `shortage`."""
        rows = self.tables.rows_of(names)
        self.ranking.take_profiles(rows)
        due = self.evictor.due_by_length(rows)
        if shortage.blocks:
            able = self.requests.due.select(rows, self.tables.columns, gives=True)
            giving = self.shortages.share(able, self.ranking.least, shortage)
            due = np.append(due, giving)
        return self.evictor.evict(due)

    def commit_step(self, scheduled: Scheduled) -> StepPlan:
        """Append the tokens of the scheduled requests; returns the plan for the worker."""
        rows, grown = self.appender.append(scheduled)
        plan = StepPlan(self.current.number, requests=self.appender.plan(rows, grown))
        if self.ranking.has_readers():
            before = self.tables.columns.num_tokens[rows] - np.diff(grown.starts)
            giving = self.shortages.soon(rows)
            self.ranking.request_signals(plan, scheduled.request_ids, rows, before, giving)
        self.relocator.hand_over(plan)
        self.parking.hand_over(plan)
        self.current.is_planned = False
        self._count_commit()
        return plan

    def _count_commit(self) -> None:
        self.counters.invariants.checked += 1
        if self.check_every_step:
            try:
                self.check()
            except InvariantViolation as violation:
                self.current.violated(violation)

    def _missing_blocks(self, several: Sequence[tuple[str, int]], freed: list[int]) -> int:
        """Blocks of all groups that requests that have evicted need for `several` new tokens, by
        name how many, beyond the free ones, `freed` included.
        """
        tables = self.tables
        virtual = [pair for pair in several if pair[0] in tables and tables[pair[0]].virtual]
        return self.demand.of_chunks(virtual) - self._num_free(freed)

    def _num_free(self, freed: list[int]) -> int:
        """The free blocks once `freed` are returned."""
        pool = self.tables.pool
        return self.store.num_free_blocks() + pool.num_without_holder(freed)

    def _shortage(
        self, ready: list[str], prefilling: Sequence[tuple[str, int]], freed: list[int]
    ) -> tuple[Shortage, list[int]]:
        """The shortage that remains after a round, if requests may give for it, and the blocks that
        the round freed. `freed`: those that the step has freed before.
        """
        self.current.is_short_soon = self.shortages.is_near()
        if not self.current.is_short_soon:
            return NO_SHORTAGE, []
        shortage = self.shortages.measure(ready, prefilling, self._num_free(freed))
        if shortage.blocks == 0:
            return shortage, []
        reclaimed = self.relocator.reclaim_excess(missing_blocks=shortage.missing_blocks)
        if reclaimed:
            num_free = self._num_free(freed + reclaimed)
            shortage = self.shortages.measure(ready, prefilling, num_free)
        return shortage, reclaimed

    def finish_step(self, report: WorkerReport | None, step: int) -> None:
        """Process the end of `step`; `report` is None if the worker sent none."""
        self.current.num_reports += 1
        # Steps run in order: outstanding reports of earlier steps are lost.
        for earlier in self.relocator.steps_in_flight(before=step):
            self.relocator.finish_step(earlier, 0, self._check_copies(None, earlier))
        fault = self._check_copies(report, step)
        copy_us = report.copy_us if report is not None else 0
        self.counters.reclamation.copy_us += copy_us
        self.relocator.finish_step(step, copy_us, fault)
        if detail := self.parking.finish_step(report, step):
            self.current.violated(InvariantViolation("I3", detail))
        if report is None:
            return
        self.prices.copies.add(report.copy_us, report.moved_tokens)
        self.prices.holes.add(report.pack_us, report.packed_tokens)
        self.prices.probes.add(report.probe_us, report.probed_queries)
        self.counters.reclamation.packed_tokens += report.packed_tokens
        self.counters.reclamation.pack_us += report.pack_us
        self.counters.invariants.verified_relocations += report.verified_relocations
        self.counters.invariants.verify_us += report.verify_us
        if report.violation is not None:
            self.current.violated(InvariantViolation("I1", report.violation))
        if report.disagreement is not None:
            self.current.violated(InvariantViolation("ranks", report.disagreement))
        self.ranking.receive(report)

    def truncate(self, rejected: Mapping[str, int]) -> None:
        """Take back the drafts of the newest step that were rejected, by request how many.

        Requests that have released their blocks are skipped.
        """
        tables = self.tables
        names = [name for name in rejected if name in tables]
        rows = tables.rows_of(names)
        counts = np.array([rejected[name] for name in names], dtype=np.int64)
        totals = tables.columns.num_tokens[rows] - counts
        self.parking.cut(rows, totals)
        tables.truncate(rows, totals)

    def check_lengths(self, num_tokens: Mapping[str, int]) -> None:
        """Check that tables have as many tokens as the engine counts, by request, after a step."""
        for request_id, count in num_tokens.items():
            table = self.tables[request_id]
            if table.num_tokens != count:
                detail = f"{request_id} has {table.num_tokens} tokens in its table, {count} in vLLM"
                self.current.violated(InvariantViolation("I4", detail))

    def sampled(self, request_ids: list[str], num_tokens: int, now: float) -> None:
        """A step gave `request_ids` `num_tokens` tokens in total; `now`: monotonic seconds."""
        self.counters.tokens.generated += num_tokens
        self.latency.tokens(request_ids, now)

    def _check_copies(self, report: WorkerReport | None, step: int) -> str | None:
        """Check that the report is of this step and counts all of its copies (I3).

        Returns what is wrong, or None.
        """
        planned = self.relocator.num_planned_copies(step)
        reported, done = (step, 0) if report is None else (report.step, report.moved_tokens)
        if reported == step and done == planned:
            return None
        answer = "none was reported" if report is None else f"the report of {reported} says {done}"
        detail = f"step {step} copies {planned} tokens, {answer}"
        self.current.violated(InvariantViolation("I3", detail))
        return detail

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Recompute all invariants; raises InvariantViolation."""
        tables, requests = self.tables, self.requests
        tables.check()
        self.parking.check()
        self.swapper.check()
        if set(requests.held) != {table.request_id for table in tables}:
            raise InvariantViolation("I4", "a request has a table but no state, or the reverse")
        if differences := self.store.differences(tables):
            raise InvariantViolation("I4", "; ".join(differences[:3]))
