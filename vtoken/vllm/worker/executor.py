"""The worker's side of the step protocol: mirrors, the inputs of attention, and the report.

Independent of the device and of vLLM's model runner version. A runner calls, once a step:

    begin(plan, restarted, drafts)
                            drop the mirrors of restarted requests; start an empty report. Without a
                            plan every request is positional, and there is no report
    prepare(blocks_of)      before vLLM appends blocks: make mirrors of new requests; return the
                            block tables to replace
    before_copies()         hash the retained tokens of sampled relocations, and sampled victims
    apply()                 after vLLM: apply evictions, moves, restores and new tokens to the
                            mirrors, and compare the hashes
    physical(batch)         the differences from vLLM's own inputs: slots, counts, holes, probes
    forward_ended()         after the forward is launched: feed the probes to the accumulators and
                            start the transfer of the requested scores; `attach` calls it if needed
    reject(rejected)        after sampling, if there are drafts: take back the rejected ones, here
                            too, so that no score rests on them
    attach(output)          after sampling: attach the report to the output

The runner makes the step's copies, because their stream and time depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.base.arrays import Ints, Ragged
from vtoken.core.protocol.mirror import BlockTables, Mirror, Mirrors
from vtoken.core.protocol.step import NO_IDS, StepPlan, WorkerReport
from vtoken.vllm.drafts import NO_DRAFTS
from vtoken.vllm.worker.content_check import ContentCheck, Contents
from vtoken.vllm.worker.delivery import attach_report
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import PendingScores, Scores
from vtoken.vllm.worker.stages import ONE_STAGE, Stages

BlocksOf = Callable[[str], Sequence[int]]


def restarted(scheduler_output: Any) -> set[str]:
    """Requests whose mirrors are obsolete: they end, are preempted, resume or start now."""
    return {
        *scheduler_output.finished_req_ids,
        *(scheduler_output.preempted_req_ids or ()),
        *scheduler_output.scheduled_cached_reqs.resumed_req_ids,
        *(request.req_id for request in scheduler_output.scheduled_new_reqs),
    }


@dataclass(frozen=True, slots=True)
class Batch:
    """The step's batch of B requests, in vLLM's order.

    The `num_new` [B] tokens of a request start at token `first` [B] of the batch; `num_computed`
    [B] tokens of it were computed before. `tables(rows)`: the block tables of batch rows [n] after
    this step's allocations.
    """

    names: list[str]
    first: Ints
    num_new: Ints
    num_computed: Ints
    tables: Callable[[Ints], BlockTables]

    @classmethod
    def of(
        cls,
        names: list[str],
        starts: Sequence[int] | Ints,
        num_computed: Sequence[int] | Ints,
        tables: Callable[[Ints], BlockTables],
    ) -> Batch:
        """From vLLM's own arrays, which may be longer: `starts` [B + 1] of the queries."""
        size = len(names)
        bounds = np.asarray(starts[: size + 1], dtype=np.int64)
        computed = np.asarray(num_computed[:size], dtype=np.int64)
        return cls(names, bounds[:-1], np.diff(bounds), computed, tables)


@dataclass(frozen=True, slots=True)
class RowsWithHoles:
    """The h requests of the batch whose live tokens do not fill the front of their block table.

    `index` [h]: rows of the batch. `rows` [h]: rows of the mirrors. `num_new` [h]: tokens of this
    step. `borrowed`: the blocks borrowed for each.
    """

    index: Ints
    rows: Ints
    num_new: Ints
    borrowed: Ragged

    @classmethod
    def none(cls) -> RowsWithHoles:
        return cls(NO_IDS, NO_IDS, NO_IDS, Ragged.empty())

    def __len__(self) -> int:
        return len(self.index)


@dataclass(slots=True)
class PhysicalStep:
    """Where this step's attention differs from the positional inputs that vLLM prepared.

    Row `rows[i]` of the batch reads `seq_lens[i]` tokens, those of row `mirror_rows[i]` of
    `mirrors`: all that vLLM counts but `num_dead[i]`. Token `writes[0, j]` of the batch is written
    to slot `writes[1, j]`. Rows `with_holes` cannot be read through their block table.
    """

    mirrors: Mirrors
    rows: Ints = field(default_factory=lambda: NO_IDS)
    mirror_rows: Ints = field(default_factory=lambda: NO_IDS)
    seq_lens: Ints = field(default_factory=lambda: NO_IDS)
    num_dead: Ints = field(default_factory=lambda: NO_IDS)
    writes: Ints = field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))
    with_holes: RowsWithHoles = field(default_factory=RowsWithHoles.none)
    probed: list[ProbedRequest] = field(default_factory=list)


class StepExecutor:
    """The mirrors of one worker, the step's plan and its report.

    `contents` reads back K and V; `scores` turns probes into reported scores. `ranks`: this
    worker's peers; `stages`: the stages before and after it. A runner wraps its work between
    `prepare` and `apply` in `ranks.deferred_errors()`, and all of it in `stages.told_of_errors`, so
    that the other ranks and the later stages learn of an error before the forward.
    """

    def __init__(
        self,
        block_size: int,
        contents: Contents,
        scores: Scores,
        ranks: Ranks,
        stages: Stages = ONE_STAGE,
    ) -> None:
        self.block_size = block_size
        self.ranks = ranks
        self.stages = stages
        self._scores = scores
        self._check = ContentCheck(contents, block_size)
        self.mirrors = Mirrors()
        self._rows = NO_IDS  # rows of the plan's requests in the mirrors
        self._keeps_signals = False  # some mirror may have accumulators
        self.plan: StepPlan | None = None
        self.report: WorkerReport | None = None
        self._drafts: Mapping[str, int] = NO_DRAFTS
        self._probed: list[ProbedRequest] = []
        self._pending_scores: PendingScores | None = None

    def begin(
        self,
        plan: StepPlan | None,
        restarted: Iterable[str],
        drafts: Mapping[str, int] = NO_DRAFTS,
    ) -> None:
        """`drafts`: how many of a request's tokens in this step are drafts, by name."""
        self.plan = plan
        self._drafts = drafts
        self._probed, self._pending_scores = [], None
        if plan is None:  # no request has evicted anything, and none is probed
            self.report = None
            self.mirrors.clear()
            return
        self.report = WorkerReport(plan.step)
        self.mirrors.drop(restarted)

    def prepare(self, blocks_of: BlocksOf) -> list[tuple[str, Ints]]:
        """Make mirrors of new requests; return the block tables to replace, by request.

        `blocks_of` returns a request's blocks before this step's allocations. It is called only for
        requests without a mirror, whose layout was positional until now; not for resumed ones.
        """
        if self.plan is None:
            return []
        requests, known = self.plan.requests, self.mirrors
        new = [i for i, name in enumerate(requests.names) if name not in known]
        if requests.resumed:
            resumed = [i for i in new if requests.names[i] in requests.resumed]
            known.start_dead([requests.names[i] for i in resumed], requests.num_tokens[resumed])
            new = [i for i in new if i not in resumed]
        if new:
            names = [requests.names[i] for i in new]
            tables = BlockTables.of([blocks_of(name) for name in names])
            known.place(names, requests.num_tokens[new], self.block_size, tables)
        return [*requests.blocks.items()]

    def before_copies(self) -> None:
        if self.plan is not None and self.report is not None and self.plan.copies:
            self._check.before(self.plan, self.mirrors, self.report)

    def note_copy(self, copy_us: int) -> None:
        """Record the step's copies, which are made or launched."""
        assert self.plan is not None
        assert self.report is not None
        self.report.copy_us = copy_us
        self.report.moved_tokens = len(self.plan.source_slots)

    @contextmanager
    def parks(self) -> Iterator[None]:
        """Report an error of the host's memory in the context, where the step's victims are copied,
        instead of raising it.
        """
        assert self.report is not None
        try:
            yield
        except MemoryError as error:
            self.report.park_fault = str(error) or "out of memory"

    def note_park(self, park_us: int) -> None:
        """Record that the step's victims are copied to host memory, or their copies launched."""
        assert self.plan is not None
        assert self.report is not None
        self.report.park_us = park_us
        self.report.parked_tokens = len(self.plan.park_slots)

    def note_restore(self, restore_us: int) -> None:
        """Record that the step's tokens are copied back, or their copies launched."""
        assert self.plan is not None
        assert self.report is not None
        self.report.restore_us = restore_us
        self.report.restored_tokens = len(self.plan.restore_slots)

    def note_packing(self, pack_us: int, packed_tokens: int) -> None:
        """Record the packing of requests with holes."""
        if self.report is not None:
            self.report.pack_us, self.report.packed_tokens = pack_us, packed_tokens

    def note_probe(self, probe_us: int, probed_queries: int) -> None:
        """Record the probes of single queries, over all layers."""
        if self.report is not None:
            self.report.probe_us, self.report.probed_queries = probe_us, probed_queries

    def apply(self) -> None:
        """Apply the plan to the mirrors and compare the step over the ranks and stages.

        Raises MirrorMismatchError when a plan's absolute counts differ from a mirror's on any rank.
        """
        if self.plan is None or self.report is None:
            return
        with self.ranks.deferred_errors():
            self._rows = self.mirrors.apply(self.plan.requests)
            self._check.after(self.plan, self.mirrors, self.report)
        self.ranks.compare(self.plan, self.mirrors, self.report)
        self.stages.compare(self.plan, self.mirrors, self.report)

    def physical(self, batch: Batch) -> PhysicalStep | None:
        """The physical inputs of attention; None when every request is positional."""
        plan = self.plan
        if plan is None or not (plan.requests or plan.signals or self.mirrors):
            return None
        requests = plan.requests
        numbers = requests.numbers(batch.names)
        step = PhysicalStep(self.mirrors, np.flatnonzero(numbers >= 0))
        if len(step.rows):
            own = numbers[step.rows]
            step.mirror_rows, step.seq_lens = self._rows[own], requests.num_live[own]
            step.num_dead = self.mirrors.columns.num_tokens[step.mirror_rows] - step.seq_lens
            step.writes = requests.writes(numbers, batch.first)
            holes = np.flatnonzero(~requests.dense[own])
            if len(holes):
                index = step.rows[holes]
                step.with_holes = RowsWithHoles(
                    *(index, step.mirror_rows[holes], batch.num_new[index]),
                    requests.scratch.take(own[holes]),
                )
        if len(step.rows) < len(batch.names):
            self._mirror_positional(batch, np.flatnonzero(numbers < 0), plan)
        if plan.signals or self._keeps_signals:
            self._keep_signals(batch, plan, step)
        self._probed = step.probed
        return step

    def _mirror_positional(self, batch: Batch, index: Ints, plan: StepPlan) -> None:
        """Update the mirrors of positional requests, batch rows `index`, that have signals."""
        if plan.signals:
            index = index[[batch.names[i] in plan.signals for i in index.tolist()]]
        else:
            index = NO_IDS
        names = [batch.names[i] for i in index.tolist()]
        if len(self.mirrors) > len(plan.requests):  # some mirrors are of positional requests
            self.mirrors.drop({*batch.names}.difference(names, plan.requests.names))
        if names:
            ends = batch.num_computed[index] + batch.num_new[index]
            self.mirrors.place(names, ends, self.block_size, batch.tables(index))

    def _keep_signals(self, batch: Batch, plan: StepPlan, step: PhysicalStep) -> None:
        probed: list[tuple[str, int, int, Mirror]] = []
        for name, first, num_new in zip(
            batch.names, batch.first.tolist(), batch.num_new.tolist(), strict=True
        ):
            mirror = self.mirrors.get(name)
            if mirror is None:
                continue
            kept = self.stages.own(plan.signals.get(name, ()))
            mirror.keep(kept, self._scores.make_accumulator)
            if name in plan.probed:
                probed.append((name, first, num_new, mirror))
        # A request that is not in this batch may keep signals too.
        self._keeps_signals = bool(plan.signals) or any(
            mirror.accumulators for mirror in self.mirrors.values()
        )
        if probed:
            step.probed = ProbedRequest.of(probed, self.ranks.heads, self._drafts)

    def reject(self, rejected: Mapping[str, int]) -> None:
        """Take back the newest tokens of requests with drafts, by name how many, and their queries.

        Call before `attach`, with every request that has drafts.
        """
        if self.plan is None:
            return
        for request in self._probed:
            if request.num_drafts:
                request.reject(rejected.get(request.request_id, 0))
        self.mirrors.truncate(rejected)

    def forward_ended(self) -> None:
        """Process the step's probes; further calls in the same step do nothing."""
        if self.plan is None or self.report is None or self._pending_scores is not None:
            return
        probed, self._probed = self._probed, []
        shares = self.stages.shares(self.report)
        self._pending_scores = self._scores.finish(
            probed, self.plan, self.mirrors, self.ranks, self.stages, shares
        )
        self.stages.hand_on(shares, self.report)

    def attach(self, output: Any) -> Any:
        """Attach the report, with the requested scores, to `output`; return the output to send.

        vLLM drops the output of every stage but the last.
        """
        if self.report is None or self.plan is None or output is None:
            return output
        self.forward_ended()
        if not self.stages.is_last:
            return output
        scores = self._pending_scores if self.plan.want_scores else None
        return attach_report(output, self.report, scores)
