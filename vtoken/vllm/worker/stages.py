"""The stages of one pipeline-parallel engine: what each tells the next one about a step.

Every stage gets the same plan and holds its own layers of the same blocks; only the last stage's
report reaches the scheduler. A step has two messages from each stage to the next, in the direction
of the forward: its findings before the forward, its share of the scores after it. No stage waits
for a later one, so several steps stay in flight. Uses torch's process groups on the host.

1. no stage computes a step that an earlier one could not apply: it raises before it waits for the
   hidden states, which would never come
2. the violations of all stages, and the sums of their times, are in the last stage's report
3. the numbers of a signal with layers on several stages are those of one stage that had all of
   them, up to the order in which floats are added
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vtoken.base.arrays import Ints
from vtoken.base.errors import MirrorMismatchError
from vtoken.core.protocol import digest
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import StepPlan, WorkerReport
from vtoken.policies.signals import Signal
from vtoken.vllm.startup import support
from vtoken.vllm.worker.ranks import COPIED, TIMES

SignalKey = tuple[str, Signal]
Tensors = dict[SignalKey, torch.Tensor]
Owners = dict[SignalKey, tuple[Ints, int]]
Message = TypeVar("Message", "Findings", "Shares")
TAG = 0x7670  # tells our messages from vLLM's, which travel between the same processes
SENDS_A_STEP = 4  # two messages, each with its size


@dataclass(slots=True)
class Findings:
    """What the stages so far found when they applied the plan of `step`.

    `plan`, `mirrors`: the first stage's fingerprints. `report`: of all of them together; None with
    an `error`, for which a stage could not apply the plan.
    """

    step: int
    plan: int = 0
    mirrors: int = 0
    report: WorkerReport | None = None
    error: str | None = None


@dataclass(slots=True)
class Shares:
    """What the stages so far contribute to the scores of `step`, and their times in its forward.

    `rows` [P, k, n]: attention rows, the input of `folded`, of signals whose accumulator is on a
    later stage. `values` [n]: of accumulators; they belong to the tokens in `owners`. `parts`
    [P, n]: of key signals. `redundancy` [m]: of the live tokens, at least those in `owners`.
    """

    step: int = 0
    rows: Tensors = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    owners: Owners = field(default_factory=dict)
    parts: Tensors = field(default_factory=dict)
    redundancy: Tensors = field(default_factory=dict)
    pack_us: int = 0
    probe_us: int = 0


TENSORS = ("rows", "values", "parts", "redundancy")  # of `Shares`


class Stages:
    """A single stage, with all layers: nothing is sent."""

    is_last = True
    agreed = True  # no stage so far differs in the newest step
    first_layer = 0  # of this stage, among the layers of the whole model

    def own_layers(self, signal: Signal) -> dict[int, int]:
        """The signal's layers that this stage holds, by their index in `signal.layers`."""
        return dict(enumerate(signal.layers))

    def own(self, signals: Sequence[Signal]) -> Sequence[Signal]:
        """Those of `signals` that have a layer on this stage."""
        return signals

    def is_home(self, signal: Signal) -> bool:
        """Whether this stage has the last of the signal's layers, and so can complete its rows."""
        return len(signal.layers) - 1 in self.own_layers(signal)

    def wait(self, plan: StepPlan) -> None:
        """Call before anything else of the step: learn what the earlier stages found.

        Raises MirrorMismatchError if one of them could not apply `plan`.
        """

    @contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Tell the next stage of an error in the context, which ends before `compare`."""
        yield

    def compare(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Call when the plan is applied, before the forward: merge the earlier stages' findings
        into `report`, and tell the next stage.
        """

    def shares(self, report: WorkerReport) -> Shares:
        """Call after the forward: the earlier stages' shares; adds their times to `report`."""
        return Shares(report.step)

    def hand_on(self, shares: Shares, report: WorkerReport) -> None:
        """Send `shares`, with this stage's own, to the next stage, if there is one."""


ONE_STAGE = Stages()


class Pipeline(Stages):
    """One of several stages.

    `ranks`: the global ranks of all stages, in order, as `group` (gloo) numbers them; this process
    is stage `number`. `num_layers`: how many layers each stage has. `num_batches`: how many steps
    vLLM keeps in flight.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        number: int,
        num_layers: Sequence[int],
        num_batches: int,
    ) -> None:
        self._group, self._ranks, self._number = group, ranks, number
        self.is_last = number == len(ranks) - 1
        self.first_layer = sum(num_layers[:number])
        self._layers = range(self.first_layer, self.first_layer + num_layers[number])
        self._step = 0
        self._found: Findings | None = None  # by earlier stages in this step
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # gloo reads them meanwhile
        self._max_sent = SENDS_A_STEP * (num_batches + 1)

    def own_layers(self, signal: Signal) -> dict[int, int]:
        return {i: layer for i, layer in enumerate(signal.layers) if layer in self._layers}

    def own(self, signals: Sequence[Signal]) -> Sequence[Signal]:
        return tuple(signal for signal in signals if self.own_layers(signal))

    # ------------------------------------------------------------ before the forward

    def wait(self, plan: StepPlan) -> None:
        self._step = plan.step
        if self._number == 0:
            return
        self._found = found = self._receive(Findings, plan.step)
        if found.error is not None:
            self._send(found)
            raise MirrorMismatchError(f"step {plan.step}: {found.error}")

    @contextmanager
    def told_of_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = type(error).__name__
            self._send(Findings(self._step, error=f"stage {self._number}: {name}: {error}"))
            raise

    def compare(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        own = Findings(plan.step, report=report)
        if plan.is_compared:
            own.plan, own.mirrors = digest.of_plan(plan), digest.of_mirrors(plan, mirrors)
        report.violation = self._named(report.violation)
        report.disagreement = self._named(report.disagreement)
        found, self._found = self._found, None
        if found is not None and found.report is not None:
            before = found.report
            for name in COPIED.values():  # I3: all copy
                setattr(report, name, min(getattr(before, name), getattr(report, name)))
            for name in TIMES.values():
                setattr(report, name, getattr(before, name) + getattr(report, name))
            report.park_fault = before.park_fault or report.park_fault
            report.violation = _joined(before.violation, report.violation)
            differences = [
                f"stage {self._number} {text} stage 0 ({mine:08x}, {first:08x})"
                for text, mine, first in (
                    ("runs a different plan from", own.plan, found.plan),
                    ("has a different mirror from", own.mirrors, found.mirrors),
                )
                if mine != first
            ]
            difference = f"in step {plan.step}, {', '.join(differences)}" if differences else None
            report.disagreement = _joined(before.disagreement, report.disagreement, difference)
            own.plan, own.mirrors = found.plan, found.mirrors
        self.agreed = report.disagreement is None
        self._send(own)

    def _named(self, text: str | None) -> str | None:
        return None if text is None else f"stage {self._number}: {text}"

    # ------------------------------------------------------------ after the forward

    def shares(self, report: WorkerReport) -> Shares:
        if self._number == 0:
            return Shares(report.step)
        found = self._receive(Shares, report.step)
        report.pack_us += found.pack_us
        report.probe_us += found.probe_us
        if not self.agreed:  # the tensors may be of different tokens
            return Shares(report.step)
        for name in TENSORS:
            arrays = getattr(found, name)
            setattr(found, name, {key: torch.from_numpy(array) for key, array in arrays.items()})
        return found

    def hand_on(self, shares: Shares, report: WorkerReport) -> None:
        if self.is_last:
            return
        shares.pack_us, shares.probe_us = report.pack_us, report.probe_us
        for name in TENSORS:  # a tensor would take its whole storage along
            tensors = getattr(shares, name)
            setattr(shares, name, {key: tensor.numpy() for key, tensor in tensors.items()})
        self._send(shares)

    # ------------------------------------------------------------ messages

    def _send(self, message: Findings | Shares) -> None:
        """Send `message` to the next stage, if there is one, without waiting for it."""
        if self.is_last:
            return
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            to = self._ranks[self._number + 1]
            self._sent.append((dist.isend(tensor, to, group=self._group, tag=TAG), tensor))
        while len(self._sent) > self._max_sent:
            work, _ = self._sent.popleft()
            work.wait()

    def _receive(self, kind: type[Message], step: int) -> Message:
        """The previous stage's next message, which must be of this kind and `step`."""
        size = torch.empty(1, dtype=torch.int64)
        source = self._ranks[self._number - 1]
        dist.recv(size, source, group=self._group, tag=TAG)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, source, group=self._group, tag=TAG)
        message: Message = pickle.loads(data.numpy().tobytes())
        if not isinstance(message, kind) or message.step != step:
            raise MirrorMismatchError(
                f"step {step}: stage {self._number} expects {kind.__name__} of stage "
                f"{self._number - 1}, and got {type(message).__name__} of step {message.step}"
            )
        return message


def stages_of_this_worker(config: Any, num_layers: int) -> Stages:
    """The stages of vLLM's pipeline-parallel group; a collective call.

    `num_layers`: the managed layers of this worker. Raises UnsupportedError on every stage if one
    has none, or if they have another number together than the scheduler reads from vLLM's `config`.
    """
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return ONE_STAGE
    counts: list[int] = [0] * group.world_size
    dist.all_gather_object(counts, num_layers, group=group.cpu_group)
    support.check_stages(config, counts)
    in_flight = config.max_concurrent_batches
    return Pipeline(group.cpu_group, group.ranks, group.rank_in_group, counts, in_flight)


def _joined(*texts: str | None) -> str | None:
    return "; ".join(text for text in texts if text) or None
