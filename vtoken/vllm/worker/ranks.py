"""The ranks of one tensor-parallel engine: do they execute the same step, and what they found.

Every rank gets the same plan and holds its own KV heads of the same blocks; only the output rank's
report reaches the scheduler. Knows torch's process groups and the report, not the model. All calls
are collective, on the host's group: the plan decides in which steps, so every rank makes them.

1. no rank computes a step that another rank could not apply: all of them raise, before the forward
2. violations of every rank, and the slowest rank's copy, are in every rank's report
3. a mean over heads is the sum of the ranks' parts, each divided by the number of all heads
   (`probe.share_of`); a maximum is the maximum of theirs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from vtoken.errors import MirrorMismatchError
from vtoken.protocol import digest
from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import StepPlan, WorkerReport
from vtoken.vllm.worker.heads import RankHeads

Key = TypeVar("Key")


class RankField(IntEnum):
    """What every rank tells all others of a step, one int64 each."""

    PLAN = 0  # fingerprint
    MIRRORS = 1  # fingerprint
    FAULTY = 2  # it could not apply the plan
    SAYS = 3  # it has a text: a fault or a violation
    MOVED_TOKENS = 4
    COPY_US = 5
    VERIFY_US = 6


DIFFERENCES = {
    RankField.PLAN: "runs another plan than",
    RankField.MIRRORS: "has another mirror than",
}


class Ranks:
    """This process alone: every plan is its own, nothing is compared or reduced.

    `heads`: the query heads that this rank holds. `agreed`: no rank differs in the newest step.
    """

    heads = RankHeads()
    agreed = True

    @staticmethod
    def of_this_worker() -> Ranks:
        """By vLLM's tensor-parallel group."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        return Peers(group.cpu_group, group.device_group) if group.world_size > 1 else Ranks()

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Errors of the plan's application go on as they are; with peers they wait for `agree`."""
        yield

    def agree(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Once a step, when the plan has been applied and before the forward."""

    def total(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """The sum over the ranks of every one of `parts`, of any shape, on one device."""
        return parts

    def greatest(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """The maximum over the ranks, else as `total`."""
        return parts


class Peers(Ranks):
    """One of several ranks; `group` is their process group on the host (gloo), `device_group` the
    one on their devices, which the host does not wait for.
    """

    def __init__(self, group: Any, device_group: Any) -> None:
        self._group = group
        self._device_group = device_group
        self._size = dist.get_world_size(group)
        self._fault: str | None = None
        self.heads = RankHeads(dist.get_rank(group), self._size)

    @contextmanager
    def contained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fault = self._fault or f"{type(error).__name__}: {error}"

    def agree(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Compare the step over the ranks, and merge what they found into `report`.

        Raises MirrorMismatchError on every rank when any of them could not apply the plan. Ranks
        that differ are a violation in the report, which stops the engine in strict mode before
        this step's tokens leave it.
        """
        if not (plan.requests or len(plan.source_slots) or plan.want_scores):
            return
        fault, self._fault = self._fault, None
        told = fault or report.violation
        mine = torch.zeros(len(RankField), dtype=torch.int64)
        mine[RankField.PLAN] = digest.of_plan(plan)
        mine[RankField.MIRRORS] = 0 if fault else digest.of_mirrors(plan, mirrors)
        mine[RankField.FAULTY] = fault is not None
        mine[RankField.SAYS] = told is not None
        mine[RankField.MOVED_TOKENS] = report.moved_tokens
        mine[RankField.COPY_US] = report.copy_us
        mine[RankField.VERIFY_US] = report.verify_us
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(rows, mine, group=self._group)
        of_all = torch.stack(rows).numpy()  # [ranks, RankField]
        wrong: list[str] = []
        if of_all[:, RankField.SAYS].any():
            texts: list[str | None] = [None] * self._size
            dist.all_gather_object(texts, told, group=self._group)
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if of_all[:, RankField.FAULTY].any():
            raise MirrorMismatchError(f"step {plan.step}: {'; '.join(wrong)}")
        report.moved_tokens = int(of_all[:, RankField.MOVED_TOKENS].min())  # I3: every rank copies
        report.copy_us = int(of_all[:, RankField.COPY_US].max())
        report.verify_us = int(of_all[:, RankField.VERIFY_US].max())
        report.violation = "; ".join(wrong) or None
        differ = [
            f"rank {rank} {what} rank 0 ({of_all[rank, column]:08x}, {of_all[0, column]:08x})"
            for column, what in DIFFERENCES.items()
            for rank in np.flatnonzero(of_all[:, column] != of_all[0, column]).tolist()
        ]
        self.agreed = not differ
        if differ:
            report.disagreement = f"in step {plan.step}, {', '.join(differ)}"

    def total(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        return self._reduced(parts, dist.ReduceOp.SUM)

    def greatest(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        return self._reduced(parts, dist.ReduceOp.MAX)

    def _reduced(self, parts: dict[Key, torch.Tensor], op: Any) -> dict[Key, torch.Tensor]:
        """One reduction for all requests; nothing is shipped from ranks that differ."""
        if not parts or not self.agreed:
            return {}
        together = torch.cat([part.flatten() for part in parts.values()])
        on_host = together.device.type == "cpu"
        dist.all_reduce(together, op, group=self._group if on_host else self._device_group)
        reduced = together.split([part.numel() for part in parts.values()])
        return {
            key: values.view(part.shape)
            for (key, part), values in zip(parts.items(), reduced, strict=True)
        }
