"""A worker's half of the step protocol: mirrors, what attention must be told, and the report.

Knows neither the device nor which of vLLM's model runners it serves. A runner calls, once a step:

    begin(plan, gone)       requests in `gone` start anew; the step's report is empty. Without a
                            plan the step is positional throughout, and there is no report
    meet(blocks_of)         before vLLM appends blocks: the block tables to replace
    before_copies()         what sampled relocations retain is hashed
    apply()                 after vLLM: what died, moved and was appended goes into the mirrors, and
                            what was hashed is compared
    physical(batch)         what differs from vLLM's own inputs: slots, counts, holes, probes
    forward_ended()         the forward was launched: its probes go to the accumulators, and what the
                            plan wants told is on its way; `attach` does it where nobody did
    attach(output)          when the tokens are sampled: the report travels with them

The copies of the step are the runner's, since when and where they run is the device's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.arrays import Ints, Ragged
from vtoken.protocol.mirror import BlockTables, Mirror, Mirrors
from vtoken.protocol.step import NO_IDS, StepPlan, WorkerReport
from vtoken.vllm.worker.content_check import ContentCheck, Contents
from vtoken.vllm.worker.delivery import deliver
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import PendingScores, Scores

BlocksOf = Callable[[str], Sequence[int]]


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
        """By vLLM's own arrays, which may be longer: `starts` [B + 1] of the queries."""
        size = len(names)
        bounds = np.asarray(starts[: size + 1], dtype=np.int64)
        computed = np.asarray(num_computed[:size], dtype=np.int64)
        return cls(names, bounds[:-1], np.diff(bounds), computed, tables)


@dataclass(frozen=True, slots=True)
class HoleyRows:
    """The h requests of the batch whose live tokens do not fill the front of their block table.

    `index` [h]: rows of the batch. `rows` [h]: rows of the mirrors. `num_new` [h]: tokens of this
    step. `scratch`: the blocks that were lent to each.
    """

    index: Ints
    rows: Ints
    num_new: Ints
    scratch: Ragged

    @classmethod
    def none(cls) -> HoleyRows:
        return cls(NO_IDS, NO_IDS, NO_IDS, Ragged.empty())

    def __len__(self) -> int:
        return len(self.index)


@dataclass(slots=True)
class PhysicalStep:
    """Where this step's attention differs from what vLLM prepared, which is positional.

    Row `rows[i]` of the batch reads `seq_lens[i]` tokens. Token `writes[0, j]` of the batch is
    written to slot `writes[1, j]`. `holey` rows cannot be read through their block table as it is;
    what they read is in `mirrors`.
    """

    mirrors: Mirrors
    rows: Ints = field(default_factory=lambda: NO_IDS)
    seq_lens: Ints = field(default_factory=lambda: NO_IDS)
    writes: Ints = field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))
    holey: HoleyRows = field(default_factory=HoleyRows.none)
    probed: list[ProbedRequest] = field(default_factory=list)


class StepExecutor:
    """The mirrors of one worker, the step's plan and its report.

    `contents` reads back K and V; `scores` turns probes into what is told. `ranks`: this worker's
    peers. What a runner does between `meet` and `apply` belongs into
    `ranks.contained()`, so that a fault of one rank is known to all before the forward.
    """

    def __init__(self, block_size: int, contents: Contents, scores: Scores) -> None:
        self.block_size = block_size
        self.ranks = Ranks()
        self._scores = scores
        self._check = ContentCheck(contents, block_size)
        self.mirrors = Mirrors()
        self._rows = NO_IDS  # of the plan's requests, in the mirrors
        self._keeping = False  # some mirror may have signals
        self.plan: StepPlan | None = None
        self.report: WorkerReport | None = None
        self._probed: list[ProbedRequest] = []
        self._told: PendingScores | None = None

    def begin(self, plan: StepPlan | None, gone: Iterable[str]) -> None:
        self.plan = plan
        self._probed, self._told = [], None
        if plan is None:  # no request has evicted anything, and none is probed
            self.report = None
            self.mirrors.clear()
            return
        self.report = WorkerReport(plan.step)
        self.mirrors.drop(gone)

    def meet(self, blocks_of: BlocksOf) -> list[tuple[str, list[int]]]:
        """The requests whose block table is replaced, and by what; the rest keeps its blocks.

        `blocks_of` is asked for the blocks before this step's allocations, and only of requests
        that are new here: until now their layout was positional.
        """
        if self.plan is None:
            return []
        requests, known = self.plan.requests, self.mirrors
        new = [i for i, name in enumerate(requests.names) if name not in known]
        if new:
            names = [requests.names[i] for i in new]
            tables = BlockTables.of([blocks_of(name) for name in names])
            known.place(names, requests.num_tokens[new], self.block_size, tables)
        return [*requests.blocks.items()]

    def before_copies(self) -> None:
        if self.plan is not None and self.report is not None and len(self.plan.source_slots):
            self._check.before(self.plan, self.mirrors, self.report)

    def note_copy(self, copy_us: int) -> None:
        """The step's copies are made, or launched."""
        assert self.plan is not None
        assert self.report is not None
        self.report.copy_us = copy_us
        self.report.moved_tokens = len(self.plan.source_slots)

    def note_packing(self, pack_us: int, packed_tokens: int) -> None:
        """The step's attention has packed so many tokens beside holes before it read them."""
        if self.report is not None:
            self.report.pack_us, self.report.packed_tokens = pack_us, packed_tokens

    def note_probe(self, probe_us: int, probed_queries: int) -> None:
        """The step's probes of so many single queries took so long, over all layers."""
        if self.report is not None:
            self.report.probe_us, self.report.probed_queries = probe_us, probed_queries

    def apply(self) -> None:
        """Raises MirrorMismatchError when a plan's absolute counts disagree with a mirror, here or
        on another rank.
        """
        if self.plan is None or self.report is None:
            return
        with self.ranks.contained():
            self._rows = self.mirrors.apply(self.plan.requests)
            self._check.after(self.plan, self.mirrors, self.report)
        self.ranks.agree(self.plan, self.mirrors, self.report)

    def physical(self, batch: Batch) -> PhysicalStep | None:
        """The step as attention must see it; None when it is positional throughout."""
        plan = self.plan
        if plan is None or not (plan.requests or plan.probing or self.mirrors):
            return None
        requests = plan.requests
        numbers = requests.numbers(batch.names)
        step = PhysicalStep(self.mirrors, np.flatnonzero(numbers >= 0))
        if len(step.rows):
            own = numbers[step.rows]
            step.seq_lens = requests.num_live[own]
            step.writes = requests.writes(numbers, batch.first)
            holes = np.flatnonzero(~requests.dense[own])
            if len(holes):
                index, own = step.rows[holes], own[holes]
                step.holey = HoleyRows(
                    index, self._rows[own], batch.num_new[index], requests.scratch.take(own)
                )
        if len(step.rows) < len(batch.names):
            self._follow(batch, np.flatnonzero(numbers < 0), plan)
        if plan.signals or self._keeping:
            self._keep_signals(batch, plan, step)
        self._probed = step.probed
        return step

    def _follow(self, batch: Batch, others: Ints, plan: StepPlan) -> None:
        """Keep the mirrors of requests that have evicted nothing, where something is probed."""
        if plan.signals:
            others = others[[batch.names[i] in plan.signals for i in others.tolist()]]
        else:
            others = NO_IDS
        names = [batch.names[i] for i in others.tolist()]
        if len(self.mirrors) > len(plan.requests):  # some have evicted nothing
            self.mirrors.drop({*batch.names}.difference(names, plan.requests.names))
        if names:
            ends = batch.num_computed[others] + batch.num_new[others]
            self.mirrors.place(names, ends, self.block_size, batch.tables(others))

    def _keep_signals(self, batch: Batch, plan: StepPlan, step: PhysicalStep) -> None:
        self._keeping = bool(plan.signals)
        probed: list[tuple[str, int, int, Mirror]] = []
        for name, first, num_new in zip(
            batch.names, batch.first.tolist(), batch.num_new.tolist(), strict=True
        ):
            mirror = self.mirrors.get(name)
            if mirror is None:
                continue
            kept = plan.signals.get(name, ())
            mirror.keep(kept, self._scores.make_accumulator)
            if name in plan.probed:
                probed.append((name, first, num_new, mirror))
        if probed:
            rows = self.mirrors.rows_of([name for name, *_ in probed])
            live = self.mirrors.live(rows)
            step.probed = ProbedRequest.of_many(probed, live, self.ranks.heads)

    def forward_ended(self) -> None:
        """Once a step, by `attach` at the latest."""
        if self.plan is None or self._told is not None:
            return
        probed, self._probed = self._probed, []
        self._told = self._scores.finish(probed, self.plan, self.mirrors, self.ranks)

    def attach(self, output: Any) -> Any:
        """Give `output` the report, with the signals that the plan wants; returns what to send."""
        if self.report is None or self.plan is None or output is None:
            return output
        self.forward_ended()
        assert self._told is not None
        return deliver(output, self.report, self._told if self.plan.want_scores else None)
