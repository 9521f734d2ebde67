"""The ranks of one tensor-parallel engine: they compare each step and reduce scores.

Every rank gets the same plan and holds its own KV heads of the same blocks; only the output rank's
report reaches the scheduler. Uses torch's process groups and the report, not the model. All calls
are collective. The plan decides in which steps they are made, so every rank makes them.

1. no rank computes a step that another rank could not apply: all of them raise, before the forward
2. violations of every rank, and the slowest rank's copy time, are in every rank's report
3. a mean over heads is the sum of the ranks' parts, each divided by the number of all heads
   (`probe.divisor_of`); a maximum is the maximum of the parts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from vtoken.base.errors import MirrorMismatchError
from vtoken.core.protocol import digest
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import StepPlan, WorkerReport
from vtoken.vllm.worker.heads import RankHeads

Key = TypeVar("Key")


class RankField(IntEnum):
    """The int64 values that every rank sends to all ranks in a step."""

    PLAN = 0  # fingerprint
    MIRRORS = 1  # fingerprint
    FAILED = 2  # the rank could not apply the plan
    HAS_MESSAGE = 3  # the rank has an error or a violation
    MOVED_TOKENS = 4
    PARKED_TOKENS = 5
    RESTORED_TOKENS = 6
    COPY_US = 7
    PARK_US = 8
    RESTORE_US = 9
    VERIFY_US = 10


# Fields of the report of all ranks: every rank copies (I3), and the slowest decides.
COPIED = {
    RankField.MOVED_TOKENS: "moved_tokens",
    RankField.PARKED_TOKENS: "parked_tokens",
    RankField.RESTORED_TOKENS: "restored_tokens",
}
TIMES = {
    RankField.COPY_US: "copy_us",
    RankField.PARK_US: "park_us",
    RankField.RESTORE_US: "restore_us",
    RankField.VERIFY_US: "verify_us",
}


DIFFERENCES = {
    RankField.PLAN: "runs a different plan from",
    RankField.MIRRORS: "has a different mirror from",
}


class Ranks:
    """A single rank: nothing is compared or reduced.

    `heads`: the query heads that this rank holds. `agreed`: no rank differs in the newest step.
    """

    heads = RankHeads()
    agreed = True

    @staticmethod
    def of_this_worker() -> Ranks:
        """The ranks of vLLM's tensor-parallel group."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        return Peers(group.cpu_group, group.device_group) if group.world_size > 1 else Ranks()

    @contextmanager
    def deferred_errors(self) -> Iterator[None]:
        """Defer errors in applying the plan to `compare`; without peers they are raised at once."""
        yield

    def compare(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Call once a step, after the plan is applied and before the forward."""

    def sum(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """The sum over the ranks of each of `parts`, of any shape, all on one device."""
        return parts

    def max(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """The maximum over the ranks of each of `parts`, like `sum`."""
        return parts


class Peers(Ranks):
    """One of several ranks.

    `group`: their process group on the host (gloo). `device_group`: the one on their devices, which
    does not make the host wait.
    """

    def __init__(self, group: Any, device_group: Any) -> None:
        self._group = group
        self._device_group = device_group
        self._size = dist.get_world_size(group)
        self._error: str | None = None
        self.heads = RankHeads(dist.get_rank(group), self._size)

    @contextmanager
    def deferred_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"

    def compare(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Compare the step over the ranks, and merge the ranks' findings into `report`.

        Raises MirrorMismatchError on every rank when any of them could not apply the plan. Ranks
        that differ are a violation in the report, which stops the engine in strict mode before
        this step's tokens leave it.
        """
        if not plan.is_compared:
            return
        error, self._error = self._error, None
        message = error or report.violation
        own = torch.zeros(len(RankField), dtype=torch.int64)
        own[RankField.PLAN] = digest.of_plan(plan)
        own[RankField.MIRRORS] = 0 if error else digest.of_mirrors(plan, mirrors)
        own[RankField.FAILED] = error is not None
        own[RankField.HAS_MESSAGE] = message is not None
        for field, name in (COPIED | TIMES).items():
            own[field] = getattr(report, name)
        rows = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(rows, own, group=self._group)
        fields = torch.stack(rows).numpy()  # [ranks, RankField]
        messages: list[str] = []
        if fields[:, RankField.HAS_MESSAGE].any():
            texts: list[str | None] = [None] * self._size
            dist.all_gather_object(texts, message, group=self._group)
            messages = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if fields[:, RankField.FAILED].any():
            raise MirrorMismatchError(f"step {plan.step}: {'; '.join(messages)}")
        for field, name in COPIED.items():
            setattr(report, name, int(fields[:, field].min()))
        for field, name in TIMES.items():
            setattr(report, name, int(fields[:, field].max()))
        if report.parked_tokens < len(plan.park_slots):
            report.park_fault = report.park_fault or "the host of another rank refused memory"
        report.violation = "; ".join(messages) or None
        differences = [
            f"rank {rank} {text} rank 0 ({fields[rank, column]:08x}, {fields[0, column]:08x})"
            for column, text in DIFFERENCES.items()
            for rank in np.flatnonzero(fields[:, column] != fields[0, column]).tolist()
        ]
        self.agreed = not differences
        if differences:
            report.disagreement = f"in step {plan.step}, {', '.join(differences)}"

    def sum(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        return self._all_reduce(parts, dist.ReduceOp.SUM)

    def max(self, parts: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        return self._all_reduce(parts, dist.ReduceOp.MAX)

    def _all_reduce(self, parts: dict[Key, torch.Tensor], op: Any) -> dict[Key, torch.Tensor]:
        """One reduction for all requests; nothing when ranks differ."""
        if not parts or not self.agreed:
            return {}
        flat = torch.cat([part.flatten() for part in parts.values()])
        on_host = flat.device.type == "cpu"
        dist.all_reduce(flat, op, group=self._group if on_host else self._device_group)
        reduced = flat.split([part.numel() for part in parts.values()])
        return {
            key: values.view(part.shape)
            for (key, part), values in zip(parts.items(), reduced, strict=True)
        }
