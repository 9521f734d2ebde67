"""A worker's half of the step protocol: mirrors, what attention must be told, and the report.

Knows neither the device nor which of vLLM's model runners it serves. A runner calls, once a step:

    begin(plan, gone)       requests in `gone` start anew; the step's report is empty. Without a
                            plan the step is positional throughout, and there is no report
    meet(blocks_of)         before vLLM appends blocks: the block tables to replace
    before_copies()         what sampled relocations retain is hashed
    apply()                 after vLLM: what died, moved and was appended goes into the mirrors, and
                            what was hashed is compared
    physical(batch, ...)    what differs from vLLM's own inputs: slots, counts, holes, probes
    forward_ended()         the forward was launched: its probes go to the keepers, and what the
                            plan wants told is on its way; `attach` does it where nobody did
    attach(output)          when the tokens are sampled: the report travels with them

The copies of the step are the runner's, since when and where they run is the device's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.arrays import Ints
from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import RequestStep, StepPlan, WorkerReport
from vtoken.vllm.worker.content_check import ContentCheck, Contents
from vtoken.vllm.worker.delivery import deliver
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import Scores, Told

BlocksOf = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """`request_id` has row `index` of the batch; its `num_new` tokens start at token `first`, and
    `num_computed` tokens of it were computed before.
    """

    request_id: str
    index: int
    first: int
    num_new: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class HoleyRow:
    """A request of the batch whose live tokens do not fill the front of its block table."""

    row: BatchRow
    part: RequestStep
    mirror: Mirror


@dataclass(slots=True)
class PhysicalStep:
    """Where this step's attention differs from what vLLM prepared, which is positional.

    Row `rows[i]` reads `seq_lens[i]` tokens. `holey` rows cannot be read through their block table
    as it stands.
    """

    rows: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    holey: list[HoleyRow] = field(default_factory=list)
    probed: list[ProbedRequest] = field(default_factory=list)
    probe_layers: frozenset[int] = frozenset()
    _writes: list[Ints] = field(default_factory=list)

    def write(self, first: int, slots: Ints) -> None:
        """The tokens of the batch from `first` on are written to `slots` [k]."""
        tokens = np.arange(first, first + len(slots), dtype=np.int64)
        self._writes.append(np.stack([tokens, slots]))

    @property
    def writes(self) -> Ints:
        """[2, k]: token of the batch, and the slot that it is written to."""
        return np.concatenate(self._writes, axis=1)


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
        self.mirrors: dict[str, Mirror] = {}
        self.plan: StepPlan | None = None
        self.report: WorkerReport | None = None
        self._probed: list[ProbedRequest] = []
        self._told: Told | None = None

    def begin(self, plan: StepPlan | None, gone: Iterable[str]) -> None:
        self.plan = plan
        self._probed, self._told = [], None
        if plan is None:  # no request has evicted anything, and none is probed
            self.report = None
            self.mirrors.clear()
            return
        self.report = WorkerReport(plan.step)
        for request_id in gone:
            self.mirrors.pop(request_id, None)

    def meet(self, blocks_of: BlocksOf) -> list[tuple[str, list[int]]]:
        """The requests whose block table is replaced, and by what; the rest keeps its blocks.

        `blocks_of` is asked for the blocks before this step's allocations, and only of requests
        that are new here: until now their layout was positional.
        """
        replaced: list[tuple[str, list[int]]] = []
        if self.plan is None:
            return replaced
        for request_id, part in self.plan.requests.items():
            if request_id not in self.mirrors:
                self.mirrors[request_id] = Mirror.positional(
                    blocks_of(request_id), part.num_tokens, self.block_size
                )
            if part.blocks is not None:
                replaced.append((request_id, part.blocks))
        return replaced

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

    def apply(self) -> None:
        """Raises MirrorMismatchError when a plan's absolute counts disagree with a mirror, here or
        on another rank.
        """
        if self.plan is None or self.report is None:
            return
        with self.ranks.contained():
            for request_id, part in self.plan.requests.items():
                self.mirrors[request_id].apply(part)
            self._check.after(self.plan, self.mirrors, self.report)
        self.ranks.agree(self.plan, self.mirrors, self.report)

    def physical(self, batch: Iterable[BatchRow], blocks_of: BlocksOf) -> PhysicalStep | None:
        """The step as attention must see it; None when it is positional throughout.

        `blocks_of` is asked for the blocks after this step's allocations.
        """
        plan = self.plan
        if plan is None or not (plan.requests or plan.probing or self.mirrors):
            return None
        step = PhysicalStep()
        for row in batch:
            part = plan.requests.get(row.request_id)
            if part is not None:
                step.write(row.first, part.new_slots)
                step.rows.append(row.index)
                step.seq_lens.append(part.num_live)
                if not part.dense:
                    step.holey.append(HoleyRow(row, part, self.mirrors[row.request_id]))
            elif row.request_id in plan.signals:
                self._follow(row, blocks_of(row.request_id))
            else:
                self.mirrors.pop(row.request_id, None)
                continue
            mirror = self.mirrors[row.request_id]
            kept = plan.signals.get(row.request_id, ())
            mirror.keep(kept, plan.signal_layers, self._scores.make_keeper)
            if row.request_id in plan.probed:
                step.probed += ProbedRequest.of(row.request_id, row.first, row.num_new, mirror)
        if plan.probe_layers is not None:
            step.probe_layers = frozenset(plan.probe_layers)
        self._probed = step.probed
        return step

    def _follow(self, row: BatchRow, block_ids: Sequence[int]) -> None:
        """Keep the mirror of a request that has evicted nothing, for the probe."""
        mirror = self.mirrors.get(row.request_id)
        start = 0 if mirror is None else mirror.num_tokens
        end = row.num_computed + row.num_new
        if mirror is None:
            self.mirrors[row.request_id] = Mirror.positional(block_ids, end, self.block_size)
        else:
            blocks = np.asarray(block_ids, dtype=np.int64)
            ids = np.arange(start, end, dtype=np.int64)
            mirror.append(blocks[ids // self.block_size] * self.block_size + ids % self.block_size)

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
